"""`trackway demo`: train the tiny model with a trace of every trajectory, on local or attached services.

An active run of the same seed is followed. A stopped run is resumed if its settings are the same. Otherwise a new run
starts under the next free name: seed0, seed0-2, seed0-3, ...

demo = Demo(deployment, seed, data_dir, model_path, overrides)
info, done = demo.start()
info = demo.follow(info, show)
summary, notes = summarise(deployment, info, clock)
"""

import importlib.util
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from trackway import traces
from trackway.clients import TrainerClient, run
from trackway.deploy.config.engine_python import SERVERS
from trackway.deploy.config.services_for_run import Decision
from trackway.deploy.deployment.attach import folder_here
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import launch, plot
from trackway.deploy.runs.losses import trace_losses, tracking_losses
from trackway.deploy.runs.standalone import SERVER_START_S, changed_since, model_of, services_here
from trackway.system import atomic_write
from trackway.system.user_error import UserError
from trackway.traces import rules
from trackway.traces.verify import Rule, settle
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.config.changes import changes_between
from trackway.trainer.config.compose import leaves
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import read_trajectories
from trackway.wire.base import NON_FINITE
from trackway.wire.tracing import TraceBackend
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunState
from trackway.wire.trajectory import Trajectory

TRAIN_ROWS, HELD_OUT_ROWS = 2000, 256
REWARD_CURVE = "reward.png"
TRACES_DEADLINE_S = 60.0
"""Longest wait for the last spans to arrive in MLflow."""


class Summary(BaseModel):
    """Result of the demo, written to `summary.json`."""

    model_config = ConfigDict(ser_json_inf_nan=NON_FINITE)

    accuracy_before: float | None
    """Accuracy of the weights that the run started from; None without a validation before its first step."""
    accuracy_after: float | None
    """Accuracy of its newest validation after a step; None without one."""
    steps: int
    trajectories: int
    """Validation included, unless the run's folder cannot be read."""
    traced: int
    complete_traces: int | None
    """None when the traces could not be read."""
    failed_trajectories: int
    seconds_total: float
    seconds_training: float
    mlflow_uri: str
    experiment_id: str
    run_id: str
    undelivered: list[str]
    """Traces, feedback and metrics that backends lack: a sentence for each kind, with its number."""


@dataclass
class PhaseTimes:
    """Times (time.monotonic) at which the demo's phases ended."""

    started: float
    services_ready: float = 0.0
    trained: float = 0.0


@dataclass(frozen=True)
class RunOutput:
    """Metrics and trajectories of a run."""

    rows: list[MetricsRow]
    trajectories: list[Trajectory]

    @classmethod
    def of(cls, folder: RunFolder) -> "RunOutput":
        """Reads them from the run's folder."""
        files = sorted((folder.path / "trajectories").glob("*.parquet"))
        return cls(folder.rows(), [trajectory for file in files for trajectory in read_trajectories(file)])

    @property
    def traced(self) -> list[Trajectory]:
        """The trajectories that have a trace."""
        return [trajectory for trajectory in self.trajectories if trajectory.trace_id]

    def summary(self, info: RunInfo, clock: PhaseTimes, mlflow_uri: str, complete_traces: int | None) -> Summary:
        """Counts, accuracies and seconds."""
        accuracies = [
            ("critic/score/mean" in row.data, value)
            for row in self.rows
            for key, value in row.data.items()
            if plot.is_accuracy(key)
        ]
        return Summary(
            accuracy_before=next((value for is_trained, value in accuracies if not is_trained), None),
            accuracy_after=next((value for is_trained, value in reversed(accuracies) if is_trained), None),
            steps=info.step,
            trajectories=len(self.trajectories),
            traced=len(self.traced),
            complete_traces=complete_traces,
            failed_trajectories=sum(trajectory.error is not None for trajectory in self.trajectories),
            seconds_total=round(time.monotonic() - clock.started, 1),
            seconds_training=round(clock.trained - clock.services_ready, 1),
            mlflow_uri=mlflow_uri,
            experiment_id=info.experiment_id or "",
            run_id=info.run_id or "",
            undelivered=[*trace_losses(info, None), *tracking_losses(info)],
        )


def set_aside(outputs: Path) -> Path | None:
    """Rename the folder of an earlier demo; returns the new path, or None when there was none."""
    if not outputs.exists():
        return None
    aside = outputs.with_name(f"{outputs.name}-{datetime.fromtimestamp(outputs.stat().st_mtime):%Y%m%d-%H%M%S}")
    outputs.rename(aside)
    return aside


@dataclass(frozen=True)
class DemoServices:
    """The services that a demo with overrides starts."""

    settings: UpSettings
    serve_config: dict[str, Any]
    overrides: list[str]
    """Given overrides, and null for what this machine cannot provide."""
    decisions: list[Decision]
    """How the keys that describe the deployment were applied."""


def services_of(overrides: Sequence[str], settings: UpSettings) -> DemoServices:
    """The services for the preset with these overrides; raises UserError for what this machine lacks."""
    config = launch.placed(compose([*overrides], config_name="tiny_demo"), None)
    services = services_here(config, settings)
    requested = leaves(config.model_dump(mode="json"))
    supported = leaves(services.config.model_dump(mode="json"))
    without = [f"{key}=null" for key, value in requested.items() if value is not None and supported[key] is None]
    changes: dict[str, object] = {"model_path": model_of(config)}
    if services.engine in SERVERS:
        changes["start_timeout_s"] = max(settings.start_timeout_s, SERVER_START_S)
    return DemoServices(
        settings.model_copy(update=changes), services.serve_config, [*overrides, *without], services.decisions
    )


@dataclass(frozen=True)
class Demo:
    """The demo's run on the services of a deployment."""

    deployment: Deployment
    seed: int
    data_dir: Path | None
    """A folder for datasets that the services mount under the same path."""
    model_path: str | None
    """The model's path or id as the services see it."""
    overrides: list[str]

    def start(self) -> tuple[RunInfo, str]:
        """The run, and whether it was followed, resumed or started, in words. Raises UserError and TrackwayError."""
        newest, free = newest_of(self.seed, runs(self.deployment))
        config = self._config(free)
        if newest and self._may_go_on(newest):
            return launch.resume_run(self.deployment, newest.run), f"run {newest.run} resumes from its last checkpoint"
        if newest and newest.state not in ENDED:
            return newest, f"run {newest.run} is {newest.state} already; following it"
        if not self._given("data.train_files"):
            self._write_rows()
        return launch.start_run(self.deployment, config, free), f"run {free} starts"

    def follow(self, info: RunInfo, show: launch.Show) -> RunInfo:
        """Like `launch.follow`, but also raises UserError for a run that was stopped."""
        info = launch.follow(self.deployment, info.run, show)
        if info.state is not RunState.FINISHED:
            raise UserError(
                f"run {info.run} was stopped at step {info.step} of {info.total_steps}; repeat this command to resume"
            )
        return info

    def _config(self, name: str) -> RunConfig:
        words = [f"trackway.seed={self.seed}", f"trainer.experiment_name={name}"]
        if not self._given("data.train_files"):
            words += [f"data.train_files={self._rows}/train.parquet", f"data.val_files={self._rows}/test.parquet"]
        if not self._given("actor_rollout_ref.model.path"):
            if self.model_path is None:
                raise UserError(
                    "--model-path: expected the model's path or id as the services see it, got none; give it, or set "
                    "TRACKWAY_MODEL_PATH to the services' value"
                )
            words.append(f"actor_rollout_ref.model.path={self.model_path}")
        return launch.placed(compose([*words, *self.overrides], config_name="tiny_demo"), self.deployment)

    def _given(self, key: str) -> bool:
        return any(word.lstrip("+").partition("=")[0] == key for word in self.overrides)

    @property
    def _rows(self) -> Path:
        if self.data_dir is None:
            raise UserError(
                "--data-dir: expected a folder on the services' volume for the demo's dataset, got none; give one, "
                "such as /var/lib/trackway/data, or existing data.train_files=... and data.val_files=..."
            )
        return self.data_dir / f"tiny-seed{self.seed}"

    def _write_rows(self) -> None:
        try:
            make_tiny(self._rows, TRAIN_ROWS, HELD_OUT_ROWS, self.seed)
        except OSError as error:
            raise UserError(
                f"--data-dir: expected a folder on the services' volume that is writable from here, got "
                f"{self.data_dir} ({error}); otherwise write the dataset on the volume with `trackway data make-tiny` "
                "and give data.train_files=... and data.val_files=..."
            ) from error

    def _may_go_on(self, info: RunInfo) -> bool:
        stopped = info.interrupted or info.state in (RunState.STOPPING, RunState.STOPPED)
        folder = folder_here(info) if stopped else None
        if folder is None:
            return False
        config = self._config(info.run)
        return not changed_since(folder, config) and not changes_between(folder.config(), config)


def runs(deployment: Deployment) -> list[RunInfo]:
    """All runs of the services."""
    return run(_trainer(deployment).runs())


def newest_of(seed: int, known: Sequence[RunInfo]) -> tuple[RunInfo | None, str]:
    """The seed's newest run, if any, and the next free name."""
    pattern = re.compile(rf"{_name(seed)}(?:-(\d+))?")
    numbered = {int(match[1] or 1): info for info in known if (match := pattern.fullmatch(info.run))}
    last = max(numbered, default=0)
    return numbered.get(last), f"{_name(seed)}-{last + 1}" if last else _name(seed)


def _name(seed: int) -> str:
    return f"seed{seed}"


def summarise(deployment: Deployment, info: RunInfo, clock: PhaseTimes) -> tuple[Summary, list[str]]:
    """The summary of the run, and notes on what could not be read from here.

    Checks every trace in MLflow. Writes `summary.json`, and `reward.png` if matplotlib is installed. Raises UserError
    when the MLflow of local services lacks the run or does not answer; for attached services that is a note.
    """
    notes: list[str] = []
    folder, mlflow_uri = folder_here(info), deployment.mlflow_uri or info.mlflow_uri or ""
    if folder is None:
        output = RunOutput(run(_rows_of(deployment, info.run)), [])
        notes.append(
            f"{info.folder} cannot be read from here: counts come from the trainer's metrics, without validation, and "
            "traces were not checked"
        )
        summary = output.summary(info, clock, mlflow_uri, None).model_copy(update=_counts(output.rows, info))
    else:
        if not deployment.attached and not info.experiment_id:
            raise UserError(f"expected the run in MLflow, got none; see {folder.log} for the reason")
        output = RunOutput.of(folder)
        complete = _complete(deployment, info, output, folder.config().actor_rollout_ref.rollout.trace.backend, notes)
        # The server of local services stops with them.
        database = f"sqlite:///{deployment.outputs / 'mlflow' / 'mlflow.db'}"
        summary = output.summary(info, clock, mlflow_uri if deployment.attached else database, complete)
    atomic_write(deployment.outputs / "summary.json", summary.model_dump_json(indent=2))
    if importlib.util.find_spec("matplotlib") is not None:
        plot.reward_curve(output.rows, deployment.outputs / REWARD_CURVE, f"GRPO on tiny word problems, {info.run}")
    return summary, notes


def _counts(rows: Sequence[MetricsRow], info: RunInfo) -> dict[str, int]:
    """Counts of trajectories according to the metrics."""

    def total(*names: str) -> int:
        return int(sum(value for row in rows for name, value in row.data.items() if name.startswith(names)))

    return {
        "trajectories": total("training/trajectories", "training/left_out/"),
        "failed_trajectories": total("training/rollout_failure/failed_trajectories", "val-aux/failed_trajectories"),
        "traced": info.traces.trajectories if info.traces else 0,
    }


def _complete(
    deployment: Deployment, info: RunInfo, output: RunOutput, backends: Sequence[TraceBackend], notes: list[str]
) -> int | None:
    """The number of complete traces; None, with a note, when they cannot be read."""
    mlflow_uri = deployment.mlflow_uri or info.mlflow_uri
    if not (mlflow_uri and info.experiment_id) or TraceBackend.MLFLOW not in backends:
        notes.append("traces were not checked: the address of their MLflow is unknown here")
        return None
    rule = rules.gaps if deployment.attached else gaps_on_one_machine
    try:
        return count_complete(mlflow_uri, info.experiment_id, output.traced, rule)
    except (UserError, ModuleNotFoundError) as error:
        if not deployment.attached:
            raise
        notes.append(f"traces were not checked: {error}")
        return None


def sentence(summary: Summary) -> str:
    """The result as one line."""
    before, after, complete = summary.accuracy_before, summary.accuracy_after, summary.complete_traces
    measured = " -> ".join(f"{value:.2f}" for value in (before, after) if value is not None)
    accuracy = f"accuracy on held-out problems {measured}" if measured else "no accuracy was measured"
    traced = f"{summary.traced} traced" if complete is None else f"{complete} of {summary.traced} traces complete"
    return (
        f"{accuracy} in {summary.steps} steps; {summary.trajectories} trajectories, {summary.failed_trajectories} "
        f"failed; {traced}"
    )


def count_complete(mlflow_uri: str, experiment_id: str, traced: list[Trajectory], rule: Rule) -> int:
    """The number of traced trajectories with a complete trace in MLflow; waits up to a deadline for late spans."""
    store = traces.MlflowStore(mlflow_uri, [experiment_id])
    return len(traced) - len(settle(store, traced, TRACES_DEADLINE_S, rule))


def gaps_on_one_machine(tree: traces.TraceTree | None, trajectory: Trajectory) -> list[str]:
    """The gaps of a trace; each of the five services must also have processes of its own."""
    return [*rules.gaps(tree, trajectory), *(rules.shared_processes(tree) if tree else [])]


async def _rows_of(deployment: Deployment, name: str) -> list[MetricsRow]:
    return [row async for row in _trainer(deployment).metrics(name)]


def _trainer(deployment: Deployment) -> TrainerClient:
    return TrainerClient(deployment.url("trainer"))
