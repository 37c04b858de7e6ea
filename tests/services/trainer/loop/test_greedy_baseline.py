"""ReMax's baseline in the rewards of a group, and what becomes of a group without one."""

from collections.abc import Callable

from trackway.learner.filtering import TrainStatus, filter_trajectories
from trackway.trainer.loop.rollout_client import sampled_of, with_baseline
from trackway.trainer.metrics import update_metrics
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, Trajectory

Rollout = Callable[..., Trajectory]


def test_the_greedy_score_becomes_a_component_of_each_reward_and_a_metric(rollout: Rollout):
    group = [rollout(0, 0, reward=Reward(score=1.0, components={"correct": 1.0})), rollout(0, 1, reward=None)]

    based = with_baseline(group, rollout(0, 2, 0.25))

    assert based[0].reward == Reward(score=1.0, components={"correct": 1.0, "reward_baseline": 0.25})
    assert based[0].model_copy(update={"reward": group[0].reward}) == group[0]
    assert based[1] == group[1]
    assert based[2] == rollout(0, 2, 0.25, is_baseline=True)
    assert sampled_of(based) == based[:2]
    batch = filter_trajectories(based, version=0, max_staleness=None)
    assert batch.statuses == [TrainStatus.USED, TrainStatus.UNSCORED, TrainStatus.BASELINE]
    assert (batch.used, batch.counts["baseline"]) == (based[:1], 1)
    assert batch.metrics()["response/aborted_ratio"] == 0.5
    assert update_metrics(based[:1], version=0, max_prompt_length=9)["critic/reward_baseline/mean"] == 0.25


def test_a_group_whose_greedy_rollout_failed_is_not_trained_and_keeps_its_own_errors(rollout: Rollout):
    away = TrackwayError(ErrorCode.UNAVAILABLE, "nothing listens").to_reply().error
    own = TrackwayError(ErrorCode.INTERNAL, "its own").to_reply().error
    group = [rollout(0, 0, 1.0), rollout(0, 1, 0.0, error=own)]

    failed = with_baseline(group, rollout(0, 2, error=away))

    assert [found.error.message for found in failed if found.error] == [
        f"the greedy rollout {rollout(0, 2).id} of the group failed: nothing listens",
        "its own",
        "nothing listens",
    ]
    batch = filter_trajectories(failed, version=0, max_staleness=None)
    assert batch.statuses == [TrainStatus.INFRASTRUCTURE, TrainStatus.ERROR, TrainStatus.INFRASTRUCTURE]
    assert failed[2].is_baseline
