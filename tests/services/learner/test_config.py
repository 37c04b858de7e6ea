"""What a learner takes of a run's configuration, where several keys decide or the units differ."""

from pathlib import Path

import pytest

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.run_config import resolve
from trackway.wire.errors import TrackwayError

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (f"{ACTOR}.loss_agg_mode", "mean", "Input should be 'token-mean'"),
        (f"{ACTOR}.kl_loss_type", "k9", "Input should be 'kl', 'k1'"),
        (f"{ACTOR}.optim.lr_scheduler_type", "linear", "Input should be 'constant' or 'cosine'"),
        ("trackway.dtype", "int8", "Input should be 'auto', 'float32' or 'bfloat16'"),
        (f"{ACTOR}.ppo_mini_batch_size", 0, "greater than or equal to 1"),
        (f"{ACTOR}.loss_scale_factor", 0.0, "greater than 0"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", 0, "greater than or equal to 1"),
        (f"{ACTOR}.clip_ratio_c", 1.0, "greater than 1"),
        ("actor_rollout_ref.rollout.temperature", 0.0, "greater than or equal to 0.000001"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_key(key: str, value: str | float, problem: str):
    with pytest.raises(TrackwayError) as caught:
        resolve({key: value})

    assert key in caught.value.message
    assert problem in caught.value.message


def test_a_compute_dtype_without_a_dtype_for_the_weights_is_refused(tiny_model: Path):
    with pytest.raises(ValueError, match="dtype to be one of float32, float64, bfloat16, got 'int8'"):
        Learner(learner_config(tiny_model, dtype="int8"))


@pytest.mark.parametrize(
    ("given", "actor", "old_logprobs", "reference"),
    [
        ({}, 6, 6, 6),
        ({"micro_batch_size": 4}, 4, 4, 4),
        ({"micro_batch_size": 4, "log_prob_micro_batch_size": 3}, 4, 3, 3),
        ({"micro_batch_size": 4, "ref_micro_batch_size": 2}, 4, 4, 2),
    ],
)
def test_each_size_that_is_not_given_is_that_of_the_pass_before_it(
    given: dict[str, int], actor: int, old_logprobs: int, reference: int
):
    config = learner_config("m", mini_batch_size=6, **given)

    assert config.update_limit.rows == actor
    assert config.log_prob_limit.rows == old_logprobs
    assert config.ref_limit.rows == reference
