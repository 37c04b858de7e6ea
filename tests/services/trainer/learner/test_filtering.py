"""What becomes of a trajectory: used, failed or stale, by exact versions."""

from collections.abc import Callable

import pytest

from trackway.trainer.learner.filtering import TrainStatus, filter_trajectories
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import Trajectory, WeightSpan

Rollout = Callable[..., Trajectory]
FAILED = ErrorBody(code=ErrorCode.UNAVAILABLE, message="gone", retryable=True)


def written_by(*versions: int) -> list[WeightSpan]:
    return [WeightSpan(version=version, start=place, end=place + 1) for place, version in enumerate(versions)]


@pytest.mark.parametrize(
    ("versions", "max_staleness", "fate"),
    [
        ([7], None, TrainStatus.USED),
        ([1], None, TrainStatus.USED),
        ([7], 0, TrainStatus.USED),
        ([6], 0, TrainStatus.DROPPED_STALE),
        ([5], 2, TrainStatus.USED),
        ([4], 2, TrainStatus.DROPPED_STALE),
        ([7, 4, 6], 2, TrainStatus.DROPPED_STALE),
        ([8], 0, TrainStatus.USED),
        ([], 0, TrainStatus.USED),
    ],
)
def test_the_oldest_token_decides_whether_a_trajectory_is_stale(
    rollout: Rollout, versions: list[int], max_staleness: int | None, fate: TrainStatus
):
    trajectory = rollout(weight_versions=written_by(*versions))

    assert filter_trajectories([trajectory], 7, max_staleness).fates == [fate]


@pytest.mark.parametrize(
    "changes",
    [{"error": FAILED}, {"reward": None}, {"response_mask": [0] * 6}],
    ids=["error", "unscored", "no model token"],
)
def test_what_cannot_be_learned_from_is_failed_however_fresh(rollout: Rollout, changes: dict[str, object]):
    trajectory = rollout(weight_versions=written_by(1), **changes)

    assert filter_trajectories([trajectory], 7, 0).fates == [TrainStatus.DROPPED_FAILED]


def test_the_learner_gets_the_used_ones_in_their_order_and_the_others_are_counted(rollout: Rollout):
    step = [
        rollout(0, 0, error=FAILED),
        rollout(0, 1, weight_versions=written_by(7)),
        rollout(0, 2, weight_versions=written_by(5)),
        rollout(0, 3, reward=None),
        rollout(0, 4, weight_versions=written_by(6, 7)),
    ]

    made = filter_trajectories(step, 7, 1)

    assert [one.tags.rollout_n for one in made.used] == [1, 4]
    assert made.metrics() == {
        "training/dropped_failed": 2.0,
        "training/dropped_stale": 1.0,
        "training/left_out/error": 1.0,
        "training/left_out/no_model_token": 0.0,
        "training/left_out/unscored": 1.0,
        "response/aborted_ratio": 0.4,
    }
