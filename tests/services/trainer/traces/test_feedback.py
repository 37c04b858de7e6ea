"""The feedback on each trace."""

import math
from collections.abc import Callable, Sequence

from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.trainer.traces.run import Assessment, training_feedback, validation_feedback
from trackway.wire.trajectory import MAX_ANSWER, Trajectory

Rollout = Callable[..., Trajectory]


def traced(rollout: Rollout, n: int, score: float | None = 1.0, **changes: object) -> Trajectory:
    made = rollout(0, n, score or 0.0, trace_id=f"t{n}", span_id=f"s{n}", **changes)
    return made if score is not None else made.model_copy(update={"reward": None})


def values(assessments: Sequence[Assessment]) -> dict[str, dict[str, float | str]]:
    return {assessment.trace_id: dict(assessment.values) for assessment in assessments}


def test_each_traced_trajectory_gets_its_own_reward_advantage_and_fate(rollout: Rollout):
    trajectories = [traced(rollout, 0, None), rollout(0, 9, 1.0), traced(rollout, 1), traced(rollout, 2, 0.0)]
    statuses = [TrainStatus.UNSCORED, TrainStatus.USED, TrainStatus.STALE, TrainStatus.USED]

    made = training_feedback(FilteredBatch(trajectories, statuses), [0.5, -0.5])

    assert values(made) == {
        "t0": {"fate": "dropped_failed"},
        "t1": {"reward": 1.0, "fate": "dropped_stale"},
        "t2": {"reward": 0.0, "advantage": -0.5, "fate": "used"},
    }
    assert [assessment.span_id for assessment in made] == ["s0", "s1", "s2"]


def test_a_validation_has_rewards_only_and_nothing_for_the_failed(rollout: Rollout):
    made = validation_feedback([traced(rollout, 0), traced(rollout, 1, None), rollout(0, 2, 1.0)])

    assert values(made) == {"t0": {"reward": 1.0}}


def test_a_ground_truth_goes_with_the_rest_unless_it_is_longer_than_an_answer(rollout: Rollout):
    short, long = (
        traced(rollout, n, ground_truth="4" * length) for n, length in enumerate((MAX_ANSWER, MAX_ANSWER + 1))
    )
    statuses = [TrainStatus.USED, TrainStatus.STALE]

    assert values(validation_feedback([short, long])) == {
        "t0": {"reward": 1.0, "ground_truth": "4" * MAX_ANSWER},
        "t1": {"reward": 1.0},
    }
    trained = values(training_feedback(FilteredBatch([short, long], statuses), [0.5]))
    assert [made.get("ground_truth") for made in trained.values()] == ["4" * MAX_ANSWER, None]


def test_an_advantage_that_is_no_number_is_sent_by_its_name(rollout: Rollout):
    """A bare NaN is no JSON: the HTTP client would refuse to send it."""
    made = training_feedback(FilteredBatch([traced(rollout, 1)], [TrainStatus.USED]), [math.nan])

    assert values(made) == {"t1": {"reward": 1.0, "advantage": "NaN", "fate": "used"}}


def test_a_trajectory_that_a_later_step_trained_says_which(rollout: Rollout):
    batch = FilteredBatch([traced(rollout, 1, 0.5), traced(rollout, 2)], [TrainStatus.USED, TrainStatus.STALE])

    later, same = (values(training_feedback(batch, [0.5], step)) for step in (4, 1))

    assert later == {
        "t1": {"reward": 0.5, "advantage": 0.5, "fate": "used", "trained_step": 4.0},
        "t2": {"reward": 1.0, "fate": "dropped_stale", "trained_step": 4.0},
    }
    assert same["t1"] == {"reward": 0.5, "advantage": 0.5, "fate": "used"}
