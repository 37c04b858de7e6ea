"""`trackway demo`: train the tiny model on a laptop, with a trace of every trajectory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from trackway import traces
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import launch, plot
from trackway.system import atomic_write
from trackway.system.user_error import UserError
from trackway.traces import rules
from trackway.traces.verify import Rule, settle
from trackway.trainer.config import compose
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import read_trajectories
from trackway.wire.base import NON_FINITE
from trackway.wire.trainer import MetricsRow, RunInfo
from trackway.wire.trajectory import Trajectory

TRAIN_ROWS, HELD_OUT_ROWS = 2000, 256
TRACES_DEADLINE_S = 60.0
"""Longest wait for the last spans to arrive in MLflow."""


class Summary(BaseModel):
    """Result of the demo, written to `summary.json`."""

    model_config = ConfigDict(ser_json_inf_nan=NON_FINITE)

    accuracy_before: float | None
    """None when the run did not validate."""
    accuracy_after: float | None
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


@dataclass
class Clock:
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

    def summary(self, info: RunInfo, clock: Clock, mlflow_uri: str, complete_traces: int | None) -> Summary:
        """Counts, accuracies and seconds."""
        accuracies = [value for row in self.rows for key, value in row.data.items() if plot.is_accuracy(key)]
        return Summary(
            accuracy_before=accuracies[0] if accuracies else None,
            accuracy_after=accuracies[-1] if accuracies else None,
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
        )


def set_aside(outputs: Path) -> Path | None:
    """Rename the folder of an earlier demo; returns the new path, or None when there was none."""
    if not outputs.exists():
        return None
    aside = outputs.with_name(f"{outputs.name}-{datetime.fromtimestamp(outputs.stat().st_mtime):%Y%m%d-%H%M%S}")
    outputs.rename(aside)
    return aside


def prepare(outputs: Path, seed: int) -> list[str]:
    """Write the demo's dataset; returns the overrides that select it."""
    data = outputs / "data"
    make_tiny(data, TRAIN_ROWS, HELD_OUT_ROWS, seed)
    return data_words(data)


def data_words(folder: Path) -> list[str]:
    """The overrides that select the dataset in a folder."""
    return [f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'test.parquet'}"]


def run_name(seed: int) -> str:
    """The run's name, and its folder under the outputs."""
    return f"seed{seed}"


def run(
    deployment: Deployment, settings: UpSettings, seed: int, overrides: list[str], show: Callable[[RunInfo], None]
) -> RunInfo:
    """Train the tiny model with the demo's preset and follow it to the end."""
    data = prepare(deployment.outputs, seed)
    seed_and_model = [f"trackway.seed={seed}", f"actor_rollout_ref.model.path={settings.model_path.resolve()}"]
    name = run_name(seed)
    config = compose([*data, *seed_and_model, f"trainer.experiment_name={name}", *overrides], config_name="tiny_demo")
    launch.start_run(deployment, config, name)
    return launch.follow(deployment, name, show)


def summarise(deployment: Deployment, info: RunInfo, clock: Clock) -> Summary:
    """Summarize the run, check every trace in MLflow, and write `summary.json` and `reward.png`."""
    folder = RunFolder(Path(info.folder))
    if not info.experiment_id or not info.run_id or info.mlflow_uri is None:
        raise UserError(f"expected the run in MLflow, got none; see {folder.log} for the reason")
    output = RunOutput.of(folder)
    database = f"sqlite:///{deployment.outputs / 'mlflow' / 'mlflow.db'}"
    complete = count_complete(info.mlflow_uri, info.experiment_id, output.traced)
    summary = output.summary(info, clock, database, complete)
    keep(summary, output.rows, deployment.outputs, info.run)
    return summary


def keep(summary: Summary, rows: Sequence[MetricsRow], outputs: Path, run: str, with_curve: bool = True) -> None:
    """Write `summary.json` and, if `with_curve`, `reward.png`."""
    atomic_write(outputs / "summary.json", summary.model_dump_json(indent=2))
    if with_curve:
        plot.reward_curve(rows, outputs / "reward.png", f"GRPO on tiny word problems, {run}")


def sentence(summary: Summary) -> str:
    """The result as one line."""
    before, after, complete = summary.accuracy_before, summary.accuracy_after, summary.complete_traces
    accuracy = (
        "no accuracy was measured"
        if before is None or after is None
        else (f"accuracy on held-out problems {before:.2f} -> {after:.2f}")
    )
    traced = f"{summary.traced} traced" if complete is None else f"{complete} of {summary.traced} traces complete"
    return (
        f"{accuracy} in {summary.steps} steps; {summary.trajectories} trajectories, {summary.failed_trajectories} "
        f"failed; {traced}"
    )


def count_complete(mlflow_uri: str, experiment_id: str, traced: list[Trajectory], rule: Rule | None = None) -> int:
    """The number of traced trajectories with a complete trace in MLflow; waits up to a deadline for late spans."""
    store = traces.MlflowStore(mlflow_uri, [experiment_id])
    return len(traced) - len(settle(store, traced, TRACES_DEADLINE_S, rule or _whole_here))


def _whole_here(tree: traces.TraceTree | None, trajectory: Trajectory) -> list[str]:
    """The gaps of a trace; on one machine, each of the five services must also have separate processes."""
    return [*rules.gaps(tree, trajectory), *(rules.shared_processes(tree) if tree else [])]
