"""A learner from a checkpoint goes on as the one that wrote it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services.trainer.learner_settings import learner_config
from trackway.trainer.learner.learner import Learner
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


def ragged(rollout: Rollout, seed: int = 0) -> list[Trajectory]:
    """Three groups of four with responses of unequal length."""
    draw = random.Random(seed)
    made = []
    for row in range(12):
        size = draw.randint(2, 12)
        made.append(
            rollout(
                row // 4,
                row % 4,
                float(draw.random() < 0.5),
                response_ids=[draw.randrange(64) for _ in range(size)],
                response_mask=[1] * size,
                response_logprobs=[-draw.uniform(1, 4) for _ in range(size)],
            )
        )
    return made


@pytest.mark.parametrize(
    "changes", [{"use_kl_loss": True}, {"shuffle": True, "mini_batch_size": 5, "lr_warmup_steps": 4}]
)
def test_a_resumed_learner_goes_on_as_if_uninterrupted(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, changes: dict[str, bool | int]
):
    config = learner_config(tiny_model, lr=1e-2, **changes)
    batches = [ragged(rollout, seed) for seed in range(5)]
    straight = Learner(config)
    expected = [straight.update(batch).metrics for batch in batches]

    first = Learner(config)
    metrics = [first.update(batch).metrics for batch in batches[:3]]
    first.save(tmp_path)
    second = Learner(config)
    second.load(tmp_path)
    metrics += [second.update(batch).metrics for batch in batches[3:]]

    for resumed, uninterrupted in zip(metrics, expected, strict=True):
        assert resumed == pytest.approx(uninterrupted, abs=1e-6)
    assert second.canary() == straight.canary()


def test_a_resumed_run_keeps_the_original_reference_when_its_model_path_has_moved_on(
    tiny_model: Path, rollout: Rollout, tmp_path: Path
):
    batch = ragged(rollout)
    learner = Learner(learner_config(tiny_model, lr=1e-2, use_kl_loss=True))
    learner.update(batch)
    learner.save(tmp_path / "actor")
    learner.export(tmp_path / "huggingface")

    resumed = Learner(learner_config(tmp_path / "huggingface", lr=1e-2, use_kl_loss=True))
    resumed.load(tmp_path / "actor")

    kl = resumed.update(batch).metrics["actor/kl_loss"]
    assert kl == pytest.approx(learner.update(batch).metrics["actor/kl_loss"], abs=1e-6)
    assert kl > 1e-4
