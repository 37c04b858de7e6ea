from collections.abc import Sequence

from trackway.trainer.background import Background
from trackway.trainer.feedback import Feedback
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory


class RecordingRun:
    """A TraceRun that keeps what it is told."""

    def __init__(self) -> None:
        self.links: list[list[str]] = []
        self.values: list[tuple[str, str, float]] = []

    def link_traces(self, trace_ids: Sequence[str]) -> None:
        self.links.append(list(trace_ids))

    def log_feedback(self, trace_id: str, name: str, value: float) -> None:
        self.values.append((trace_id, name, value))


def trajectory(trace_id: str | None, score: float) -> Trajectory:
    tags = Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0)
    return Trajectory(
        id="i",
        session_id="s",
        tags=tags,
        agent_name="a",
        data_source="d",
        reward=Reward(score=score),
        stop_reason=StopReason.ANSWERED,
        trace_id=trace_id,
    )


def record(trajectories: list[Trajectory], advantages: list[float] | None, assessments: bool = True) -> RecordingRun:
    run, background = RecordingRun(), Background("test")
    Feedback(run, background, 5.0, assessments).record(trajectories, advantages)
    background.close(10)
    return run


def test_only_traced_trajectories_are_linked_and_each_gets_its_own_values():
    run = record([trajectory(None, 9.0), trajectory("aa", 1.0), trajectory("bb", 0.0)], [9.0, 0.5, -0.5])

    assert run.links == [["aa", "bb"]]
    assert run.values == [
        ("aa", "reward", 1.0),
        ("aa", "advantage", 0.5),
        ("bb", "reward", 0.0),
        ("bb", "advantage", -0.5),
    ]


def test_a_failed_trajectory_is_linked_and_has_no_values():
    failed = trajectory("aa", 0.0).model_copy(update={"reward": None})

    run = record([failed], [0.0])

    assert (run.links, run.values) == ([["aa"]], [])


def test_a_validation_has_rewards_without_advantages():
    assert record([trajectory("aa", 1.0)], None).values == [("aa", "reward", 1.0)]


def test_without_assessments_traces_are_still_linked():
    run = record([trajectory("aa", 1.0)], [0.5], assessments=False)

    assert (run.links, run.values) == ([["aa"]], [])


def test_a_step_without_traces_asks_for_nothing():
    run = record([trajectory(None, 1.0)], [0.5])

    assert (run.links, run.values) == ([], [])
