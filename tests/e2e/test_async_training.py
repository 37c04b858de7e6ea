"""The promise: rollouts go on while the learner computes, each trains once and in time, and its trace says when."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from mlflow import MlflowClient
from mlflow.entities import Span, Trace

import trackway.traces as traces
from tests.e2e.small_runs import small_run
from tests.e2e.test_training import quiet, whole
from tests.waiting import until
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunInfo, RunState
from trackway.wire.trajectory import Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, SYNC_EVERY, BOUND = 5, 2, 1
ROLLOUTS = STEPS * 4 * 4
"""Four prompts a step, four rollouts of each."""
STALENESS = "training/off_policy/trajectory_staleness_worst/max"


class Run(NamedTuple):
    """A finished run."""

    info: RunInfo
    trained: dict[int, list[Trajectory]]
    """What each step trained."""
    rows: dict[int, dict[str, float]]
    """The metrics of each step."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for step in self.trained.values() for trajectory in step]


@pytest.fixture(scope="module")
def overlapped(deployment: Deployment) -> Run:
    """A run that generates one version ahead of the learner; a version is two updates. All trajectories are traced."""
    words = small_run(
        deployment.outputs,
        "overlapped",
        STEPS,
        "async_training.staleness_threshold=1",
        f"async_training.trigger_parameter_sync_step={SYNC_EVERY}",
        "trainer.val_before_train=false",
        "trackway.trace_validation_samples=0",
    )
    RunSession(deployment).start(compose(words, config_name="tiny_demo"), "overlapped")
    info = RunSession(deployment).follow("overlapped", quiet)
    folder = Path(info.folder)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    trained = {step: read_trajectories(folder / f"trajectories/step_{step}.parquet") for step in range(1, STEPS + 1)}
    return Run(info, trained, {row["step"]: row["data"] for row in rows})


def test_every_rollout_trains_once_and_the_account_is_whole_in_every_row(overlapped: Run) -> None:
    made = overlapped.trajectories
    assert overlapped.info.state == RunState.FINISHED
    assert (len(made), len({trajectory.id for trajectory in made})) == (ROLLOUTS, ROLLOUTS)
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    assert [row["training/trajectories"] for row in overlapped.rows.values()] == [16.0] * STEPS
    accounts = [
        {name: count for name, count in row.items() if name.startswith("rollouts/")} for row in overlapped.rows.values()
    ]
    assert all(account.pop("rollouts/submitted") == sum(account.values()) for account in accounts)
    assert accounts[-1] == dict.fromkeys(accounts[-1], 0.0) | {"rollouts/used": float(ROLLOUTS)}


def test_no_token_that_trains_is_older_than_the_bound(overlapped: Run) -> None:
    first = min(span.version for trajectory in overlapped.trajectories for span in trajectory.weight_versions)
    computed = {
        step: first + (step - 1) // SYNC_EVERY - min(span.version for t in trained for span in t.weight_versions)
        for step, trained in overlapped.trained.items()
    }
    assert {step: row[STALENESS] for step, row in overlapped.rows.items()} == computed
    assert max(computed.values()) == BOUND


def test_each_trace_says_which_step_trained_it_where_that_is_a_later_one(
    deployment: Deployment, overlapped: Run
) -> None:
    later = {
        f"tr-{trajectory.trace_id}": step if step > trajectory.tags.step else None
        for step, trained in overlapped.trained.items()
        for trajectory in trained
    }
    made = {f"tr-{trajectory.trace_id}": trajectory for trajectory in overlapped.trajectories}
    experiment = str(overlapped.info.experiment_id)

    def trained_steps() -> dict[str, object] | None:
        """The feedback, once all of it is there."""
        found = {
            tree.trace_id: tree.feedback for tree in traces.MlflowStore(deployment.mlflow_uri, [experiment]).trees()
        }
        assessed = all("fate" in found.get(name, {}) for name in made)
        return {name: found[name].get("trained_step") for name in made} if assessed else None

    assert until(lambda: whole(deployment, experiment, made)).keys() == made.keys()
    assert until(trained_steps) == later
    assert len(made) == ROLLOUTS and any(later.values()) and not all(later.values())


def test_rollouts_are_generated_while_the_learner_updates(deployment: Deployment, overlapped: Run) -> None:
    client = MlflowClient(tracking_uri=deployment.mlflow_uri)
    experiment = str(overlapped.info.experiment_id)
    by_name = until(lambda: all_steps(client.search_traces(locations=[experiment], max_results=100)))
    generated = [
        span
        for trajectory in overlapped.trajectories
        for span in by_name[f"tr-{trajectory.trace_id}"].data.spans
        if span.name.startswith("chat")
    ]
    learner_spans = [
        span
        for name, trace in by_name.items()
        for span in trace.data.spans
        if name.startswith("train step") and span.name in ("old_log_prob", "update_actor", "update_weights")
    ]
    assert [span.name for span in learner_spans].count("update_actor") == STEPS
    assert any(overlap(work, chat) for work in learner_spans for chat in generated)


def all_steps(found: Sequence[Trace]) -> dict[str, Trace] | None:
    """Trajectories by id and the trainer's steps by name, once all are there, with the validation beside them."""
    named = {trace.info.tags["mlflow.traceName"]: trace for trace in found}
    steps = {name: trace for name, trace in named.items() if name.startswith("train step")}
    is_whole = len(steps) == STEPS and f"validation {STEPS}" in named and len(found) == STEPS + 1 + ROLLOUTS
    return {trace.info.trace_id: trace for trace in found} | steps if is_whole else None


def overlap(one: Span, other: Span) -> bool:
    """Whether some time lies in both spans."""
    return max(one.start_time_ns, other.start_time_ns) < min(_end(one), _end(other))


def _end(span: Span) -> int:
    assert span.end_time_ns is not None
    return span.end_time_ns
