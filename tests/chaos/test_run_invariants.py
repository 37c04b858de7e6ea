"""Two runs are compared by all that must be equal; a gap in a trace is excused only by a kill that explains it."""

from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest

from tests.chaos.fault_injection import ChaosRun, Injection
from tests.chaos.fault_schedule import Fault, Moment, Target
from tests.chaos.run_invariants import drift_of, of_the_first_weights, rollout_of, rows_of, trajectories_of, unexplained
from trackway.deploy.deployment.record import Deployment
from trackway.traces.verify import Gap
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.wire.chat import Message
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Reward, StopReason, Tags, Timings, Trajectory, Turn

NO_CHAT = "1 of 2 chat spans: none below turn 1; a process died, and with it the spans it had not exported"


@pytest.fixture
def chaos(tmp_path: Path) -> ChaosRun:
    """A run of a step a second."""
    nowhere = Deployment(base_url="http://a", dashboard_url="http://a", mlflow_uri="http://a", outputs=tmp_path)
    return ChaosRun(nowhere, "run", steps_seen=[(float(second), second) for second in range(20)])


def kill(target: Target, step: int) -> Injection:
    return Injection(Fault(Moment(step, 0), target, SIGKILL), [], [], step, since=float(step), step_after=step)


def stop(target: Target, step: int) -> Injection:
    return Injection(Fault(Moment(step, 0), target, SIGSTOP, 2.0), [], [], step, since=float(step), step_after=step)


def gap(step: int | str, *reasons: str) -> Gap:
    return Gap(trajectory=f"run/{step}/3/0", trace_id="0" * 32, name="trajectory", reasons=list(reasons))


@pytest.mark.parametrize(
    ("injection", "found"),
    [
        (kill(Target.ROLLOUT, 8), gap(8, NO_CHAT)),
        (kill(Target.ROLLOUT, 8), gap("val8", NO_CHAT)),
        (kill(Target.ROLLOUT, 8), gap(3, NO_CHAT)),
        (kill(Target.ROLLOUT, 8), gap(9, NO_CHAT)),
        (kill(Target.REWARD, 8), gap(9, "0 of 1 reward spans")),
        (kill(Target.AGENT, 8), gap(8, "the root is missing", "1 of 2 turn spans", "chat has lost its parent")),
    ],
)
def test_spans_that_a_killed_replica_had_not_exported_are_excused(chaos: ChaosRun, injection: Injection, found: Gap):
    chaos.injections = [injection]

    assert unexplained(found.trajectory, found.reasons, chaos) == []


@pytest.mark.parametrize(
    ("injection", "found"),
    [
        (stop(Target.ROLLOUT, 8), gap(8, NO_CHAT)),
        (kill(Target.TOOLS, 8), gap(8, NO_CHAT)),
        (kill(Target.WORKER, 8), gap(8, "the root is missing")),
        (kill(Target.ROLLOUT, 8), gap(2, NO_CHAT)),
        (kill(Target.ROLLOUT, 8), gap(10, NO_CHAT)),
        (kill(Target.ROLLOUT, 8), gap(8, NO_CHAT, "the root is missing")),
        (kill(Target.ROLLOUT, 8), gap(8, "3 chat spans, expected 2")),
        (kill(Target.AGENT, 8), gap(8, "tag step is '7', expected '8'")),
    ],
)
def test_other_gaps_are_not(chaos: ChaosRun, injection: Injection, found: Gap):
    chaos.injections = [injection]

    assert unexplained(found.trajectory, found.reasons, chaos) == found.reasons


def trajectory(run: str, step: int, validate: bool = False, **changes: object) -> Trajectory:
    tags = Tags(experiment_name=run, step=step, sample_index=3, rollout_n=0, validate=validate)
    message = Message(role="assistant", content="7")
    made = Trajectory(
        id=f"{run}/{'val' if validate else ''}{step}/3/0",
        session_id=run,
        tags=tags,
        agent_name="tool_agent",
        data_source="tiny",
        prompt_ids=[1, 2],
        response_ids=[7, 8],
        response_mask=[1, 1],
        response_logprobs=[-0.5, -0.25],
        turns=[Turn(index=0, messages=[message], response_start=0, response_end=2, finish_reason="stop")],
        reward=Reward(score=1.0),
        stop_reason=StopReason.ANSWERED,
    )
    return made.model_copy(update=changes)


def test_trajectories_of_two_runs_are_equal_but_for_names_times_logprobs_and_traces(tmp_path: Path):
    write_trajectories(tmp_path / "trajectories" / "step_1.parquet", [trajectory("a", 1)])
    [read] = trajectories_of(tmp_path)
    changes = {"trace_id": "1" * 32, "timings": Timings(total=9.0), "response_logprobs": [-0.5, -0.26]}

    assert rollout_of(read) == rollout_of(trajectory("b", 1, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": [1, 3]},
        {"response_ids": [7, 9]},
        {"response_mask": [1, 0]},
        {"reward": Reward(score=0.0)},
        {"turns": []},
        {"stop_reason": StopReason.MAX_TURNS},
        {"id": "b/1/3/1"},
    ],
)
def test_any_other_difference_is_seen(changes: dict[str, object]):
    assert rollout_of(trajectory("a", 1)) != rollout_of(trajectory("b", 1).model_copy(update=changes))


def test_the_first_validation_and_the_first_step_are_by_the_first_weights():
    steps = [(0, True), (1, False), (1, True), (2, False), (10, False)]
    rollouts = [rollout_of(trajectory("a", step, validate)) for step, validate in steps]

    assert [rollout.key for rollout in of_the_first_weights(rollouts)] == ["val0/3/0", "1/3/0"]


def test_rows_are_compared_by_the_metrics_of_the_prompts_and_the_first_validation_by_all(tmp_path: Path):
    folder, drift = RunFolder(tmp_path), "training/rollout_logprob_diff_max"
    folder.append_row(
        MetricsRow(step=0, data={"val-core/tiny/acc/mean@1": 0.5, "val-aux/tools/calculator/seconds/mean": 2.0})
    )
    learned = {"prompt_length/mean": 9.0, "training/global_step": 1.0, "actor/loss": 0.1, "val-aux/x": 1.0, drift: 1e-6}
    folder.append_row(MetricsRow(step=1, data=learned))

    compared = {"prompt_length/mean": 9.0, "training/global_step": 1.0}
    assert rows_of(tmp_path) == [(0, {"val-core/tiny/acc/mean@1": 0.5}), (1, compared)]
    assert drift_of(tmp_path) == [1e-6]
