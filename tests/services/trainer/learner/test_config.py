"""A learner's settings are checked when they are given."""

import pytest

from trackway.trainer.learner.config import LearnerConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_agg_mode": "mean"}, "loss_agg_mode to be one of"),
        ({"kl_loss_type": "k9"}, "kl_loss_type to be one of"),
        ({"dtype": "int8"}, "dtype to be one of float32, float64, bfloat16, got 'int8'"),
        ({"mini_batch_size": 0}, "mini_batch_size to be at least 1, got 0"),
        ({"loss_scale_factor": 0.0}, "loss_scale_factor above 0, got 0"),
        ({"ref_micro_batch_size": 0}, "ref_micro_batch_size to be at least 1, got 0"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c above 1"),
        ({"temperature": 0.0}, "temperature above 0"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        LearnerConfig("model", **changes)  # pyright: ignore[reportArgumentType]
