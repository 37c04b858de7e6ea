"""Which trajectories are trained on, and the reason for each that is not."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from trackway.learner.filtering import (
    FilteredBatch,
    GroupFilter,
    TrainStatus,
    filter_trajectories,
    train_status,
)
from trackway.wire.errors import ERRORS, ErrorBody, ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, Trajectory, Turn, WeightSpan

Rollout = Callable[..., Trajectory]
FAILED = ErrorBody(code=ErrorCode.UNAVAILABLE, message="gone", retryable=True)
GUIDED_TURN = Turn(index=0, messages=[], response_start=0, response_end=6, finish_reason="stop", guided=True)
BROKEN = ErrorBody(code=ErrorCode.INTERNAL, message="a bug", retryable=False)


def written_by(*versions: int) -> list[WeightSpan]:
    return [WeightSpan(version=version, start=place, end=place + 1) for place, version in enumerate(versions)]


@pytest.mark.parametrize(
    ("versions", "max_staleness", "status"),
    [
        ([7], None, TrainStatus.USED),
        ([1], None, TrainStatus.USED),
        ([7], 0, TrainStatus.USED),
        ([6], 0, TrainStatus.STALE),
        ([5], 2, TrainStatus.USED),
        ([4], 2, TrainStatus.STALE),
        ([7, 4, 6], 2, TrainStatus.STALE),
        ([8], 0, TrainStatus.USED),
        ([], 0, TrainStatus.USED),
    ],
)
def test_the_oldest_token_decides_whether_a_trajectory_is_stale(
    rollout: Rollout, versions: list[int], max_staleness: int | None, status: TrainStatus
):
    trajectory = rollout(weight_versions=written_by(*versions))

    assert filter_trajectories([trajectory], 7, max_staleness).statuses == [status]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"error": FAILED}, TrainStatus.INFRASTRUCTURE),
        ({"error": BROKEN}, TrainStatus.ERROR),
        ({"response_mask": [0] * 6}, TrainStatus.NO_MODEL_TOKEN),
        ({"response_ids": [], "response_mask": [], "response_logprobs": []}, TrainStatus.NO_MODEL_TOKEN),
        ({"response_mask": [0] * 6, "turns": [GUIDED_TURN]}, TrainStatus.GUIDED),
        ({"reward": None}, TrainStatus.UNSCORED),
        ({"error": BROKEN, "response_mask": [0] * 6, "reward": None}, TrainStatus.ERROR),
        ({"response_mask": [0] * 6, "reward": None}, TrainStatus.NO_MODEL_TOKEN),
    ],
)
def test_the_first_reason_is_the_status_even_of_a_stale_trajectory(
    rollout: Rollout, changes: dict[str, object], status: TrainStatus
):
    trajectory = rollout(weight_versions=written_by(1), **changes)

    assert filter_trajectories([trajectory], 7, 0).statuses == [status]


def test_the_used_trajectories_keep_their_order_and_the_others_are_counted_by_reason(rollout: Rollout):
    step = [
        rollout(0, 0, error=FAILED),
        rollout(0, 1, weight_versions=written_by(7)),
        rollout(0, 2, weight_versions=written_by(5)),
        rollout(0, 3, reward=None),
        rollout(0, 4, weight_versions=written_by(6, 7)),
        rollout(0, 5, error=BROKEN),
        rollout(0, 6, response_mask=[0] * 6),
        rollout(0, 7, error=FAILED),
    ]

    batch = filter_trajectories(step, 7, 1)

    assert [trajectory.tags.rollout_n for trajectory in batch.used] == [1, 4]
    assert batch.counts == {
        "used": 2,
        "dropped_infrastructure": 2,
        "dropped_failed": 2,
        "dropped_filtered": 1,
        "dropped_stale": 1,
    }
    assert batch.metrics() == {
        "training/dropped_infrastructure": 2.0,
        "training/dropped_failed": 2.0,
        "training/dropped_filtered": 1.0,
        "training/dropped_stale": 1.0,
        "training/left_out/infrastructure": 2.0,
        "training/left_out/error": 1.0,
        "training/left_out/no_model_token": 1.0,
        "training/left_out/guided": 0.0,
        "training/left_out/unscored": 1.0,
        "response/aborted_ratio": 0.625,
    }


def test_a_batch_without_a_status_for_each_trajectory_is_refused_and_a_decision_stays(rollout: Rollout):
    with pytest.raises(ValueError, match="zip"):
        _ = FilteredBatch([rollout(0, 0), rollout(0, 1)], [TrainStatus.USED]).used
    batch = filter_trajectories([rollout(0, 0)], 7, None)
    with pytest.raises(FrozenInstanceError):
        batch.statuses = [TrainStatus.STALE]  # pyright: ignore[reportAttributeAccessIssue]


def test_each_status_has_the_feedback_that_traces_show():
    assert {status.value: status.feedback for status in TrainStatus} == {
        "used": "used",
        "infrastructure": "dropped_infrastructure",
        "error": "dropped_failed",
        "no_model_token": "dropped_filtered",
        "guided": "dropped_filtered",
        "unscored": "dropped_failed",
        "stale": "dropped_stale",
        "no_variance": "dropped_filtered",
        "baseline": "baseline",
    }


def test_each_error_is_of_the_infrastructure_or_the_rollouts_own(rollout: Rollout):
    def status(code: ErrorCode) -> TrainStatus:
        error = ErrorBody(code=code, message="", retryable=ERRORS[code].retryable)
        return train_status(rollout(error=error), 7, None)

    assert {code.value for code in ErrorCode if status(code) is TrainStatus.ERROR} == {
        *("invalid_request", "unauthorized", "forbidden", "not_found", "model_not_found", "conflict"),
        *("unknown_tool", "unknown_agent", "unknown_data_source", "instance_not_found", "payload_too_large"),
        *("tool_failed", "tool_timeout", "agent_failed", "checkpoint_corrupt", "not_finite", "gone", "internal"),
    }
    assert all(status(code) is TrainStatus.INFRASTRUCTURE for code in ErrorCode if ERRORS[code].retryable)


@pytest.mark.parametrize(
    ("metric", "rewards", "kept"),
    [
        ("reward", [Reward(score=0.1), Reward(score=0.1), Reward(score=0.1)], False),
        ("reward", [Reward(score=0.1), Reward(score=0.1), Reward(score=0.2)], True),
        ("seq_reward", [Reward(score=1), Reward(score=1)], False),
        ("acc", [Reward(score=1), Reward(score=0)], True),
        ("acc", [Reward(score=1, components={"acc": 1}), Reward(score=0.5, components={"acc": 1})], False),
        ("acc", [Reward(score=1, components={"score": 1}), Reward(score=0.5, components={"score": 1})], False),
        ("score", [Reward(score=1, components={"score": 1}), Reward(score=0.5, components={"score": 1})], False),
        ("reward", [Reward(score=1, components={"score": 1}), Reward(score=0.5, components={"score": 1})], True),
        ("reward", [Reward(score=1)], True),
        ("reward", [Reward(score=1), None], True),
        ("reward", [Reward(score=1), None, Reward(score=1)], False),
    ],
)
def test_a_group_is_left_out_when_all_its_values_are_one(
    rollout: Rollout, metric: str, rewards: list[Reward | None], kept: bool
):
    group = [rollout(0, n, reward=reward) for n, reward in enumerate(rewards)]

    left_out = GroupFilter(metric).sift(group)

    assert (left_out is None) is kept
    if left_out is not None:
        expected = [TrainStatus.UNSCORED if reward is None else TrainStatus.NO_VARIANCE for reward in rewards]
        assert (list(left_out.trajectories), left_out.statuses) == (group, expected)


@pytest.mark.parametrize("failure", [FAILED, BROKEN])
def test_a_failed_rollout_has_no_value_in_its_group_whatever_its_score(rollout: Rollout, failure: ErrorBody):
    alike = [rollout(0, n, reward=Reward(score=1)) for n in range(2)]
    failed = rollout(0, 2, reward=Reward(score=0), error=failure)

    left_out = GroupFilter("reward").sift([*alike, failed])

    status = TrainStatus.INFRASTRUCTURE if failure is FAILED else TrainStatus.ERROR
    assert left_out is not None and left_out.statuses == [TrainStatus.NO_VARIANCE, TrainStatus.NO_VARIANCE, status]


def test_a_metric_that_the_reward_lacks_is_an_error_that_names_what_it_has(rollout: Rollout):
    group = [rollout(0, n, reward=Reward(score=1, components={"format": 1, "correct": 0})) for n in range(2)]

    with pytest.raises(TrackwayError, match=r"got 'f1', and .* has format, correct; take one of them, reward or acc"):
        GroupFilter("f1").sift(group)


def test_a_greedy_baseline_is_counted_apart_and_in_no_share(rollout: Rollout):
    batch = filter_trajectories([rollout(0, 0), rollout(0, 1, error=FAILED), rollout(0, 2, is_baseline=True)], 7, None)

    dropped = {"dropped_infrastructure": 1, "dropped_failed": 0, "dropped_filtered": 0, "dropped_stale": 0}
    assert batch.counts == {"used": 1, **dropped, "baseline": 1}
    assert batch.metrics()["response/aborted_ratio"] == 1 / 2
    assert filter_trajectories([], 7, None).counts == {"used": 0, **dropped, "dropped_infrastructure": 0}


def test_a_filter_asks_for_single_prompts_without_a_bound_and_stays_as_it_is():
    assert GroupFilter("reward") == GroupFilter("reward", at_once=1, max_prompts=None)
    with pytest.raises(FrozenInstanceError):
        GroupFilter("reward").at_once = 2  # pyright: ignore[reportAttributeAccessIssue]
