"""The dataset, the names and the summary of `trackway demo`'s runs."""

import importlib.util
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import trackway.traces as traces
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.losses import trace_losses, tracking_losses
from trackway.deploy.runs.prepare import typed
from trackway.system import atomic_write, replacing
from trackway.system.process import UserError
from trackway.traces import rules
from trackway.traces.verify import Rule, settle
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.base import NON_FINITE
from trackway.wire.trainer import MetricsRow, RunInfo, RunState
from trackway.wire.trajectory import TraceBackend, Trajectory


def reward_curve(rows: Sequence[MetricsRow], image: Path, title: str) -> None:
    """Plot the mean reward of each step, and the validation accuracy at the steps that measured it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = [(row.step, row.data["critic/score/mean"]) for row in rows if "critic/score/mean" in row.data]
    accuracies = [(row.step, value) for row in rows for key, value in row.data.items() if is_accuracy(key)]
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=130)
    axes.plot(*zip(*rewards, strict=True), color="#1f6feb", marker="o", markersize=3, label="training reward (mean)")
    if accuracies:
        axes.plot(*zip(*accuracies, strict=True), "D", color="#d1242f", label="held-out accuracy (sampled, T=1)")
    axes.set(xlabel="GRPO step", ylabel="share of correct answers", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    with replacing(image) as draft:
        figure.savefig(draft, format="png")
    pyplot.close(figure)


def is_accuracy(metric: str) -> bool:
    """Return whether a metric is a mean validation accuracy in verl's naming."""
    return metric.startswith("val-core/") and "/acc/mean@" in metric


TRAIN_ROWS, HELD_OUT_ROWS = 2000, 256
REWARD_CURVE = "reward.png"
_TRAIN_FILES = "data.train_files"
TRACES_DEADLINE_S = 60.0
"""Longest wait for the last spans to arrive in MLflow."""


class Summary(BaseModel):
    """Result of the demo, written to `summary.json`."""

    model_config = ConfigDict(ser_json_inf_nan=NON_FINITE)

    accuracy_before: float | None
    """Accuracy of the weights that the run started from. None without a validation before its first step."""
    accuracy_after: float | None
    """Accuracy of its newest validation after a step. None without one."""
    steps: int
    trajectories: int
    """Validation included."""
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
            if is_accuracy(key)
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
    """Rename the folder of an earlier demo. Returns the new path. None when there was none."""
    if not outputs.exists():
        return None
    aside = outputs.with_name(f"{outputs.name}-{datetime.fromtimestamp(outputs.stat().st_mtime):%Y%m%d-%H%M%S}")
    outputs.rename(aside)
    return aside


def demo_words(seed: int, name: str, data_dir: Path | None, overrides: Sequence[str]) -> list[str]:
    """The overrides of the demo's preset.

    Raises UserError when they need a folder for the dataset and there is none.
    """
    words = [f"trackway.seed={seed}", f"trainer.experiment_name={name}", *overrides]
    if _TRAIN_FILES in typed(overrides):
        return words
    if data_dir is None:
        raise UserError(
            "--data-dir: expected a folder on the services' volume for the demo's dataset, got none; give one, "
            "such as /var/lib/trackway/data, or existing data.train_files=... and data.val_files=..."
        )
    rows = _rows(data_dir, seed)
    return [f"{_TRAIN_FILES}='{rows}/train.parquet'", f"data.val_files='{rows}/test.parquet'", *words]


def write_rows(seed: int, data_dir: Path | None, overrides: Sequence[str]) -> None:
    """Write the demo's dataset, unless the overrides name another one. Raises UserError where it cannot be written."""
    if data_dir is None or _TRAIN_FILES in typed(overrides):
        return
    try:
        make_tiny(_rows(data_dir, seed), TRAIN_ROWS, HELD_OUT_ROWS, seed)
    except OSError as error:
        raise UserError(
            f"--data-dir: expected a folder on the services' volume that is writable from here, got {data_dir} "
            f"({error}); otherwise write the dataset on the volume with `trackway data make-tiny` and give "
            "data.train_files=... and data.val_files=..."
        ) from error


def _rows(data_dir: Path, seed: int) -> Path:
    return data_dir / f"tiny-seed{seed}"


def name_of(seed: int, known: Sequence[RunInfo]) -> str:
    """Return the name of the seed's unfinished newest run, or the next free name: seed0, seed0-2, seed0-3, ..."""
    pattern = re.compile(rf"seed{seed}(?:-(\d+))?")
    numbered = {int(match[1] or 1): info for info in known if (match := pattern.fullmatch(info.run))}
    last = max(numbered, default=0)
    newest = numbered.get(last)
    if newest is not None and (newest.interrupted or newest.state not in (RunState.FINISHED, RunState.FAILED)):
        return newest.run
    return f"seed{seed}-{last + 1}" if last else f"seed{seed}"


def summarise(deployment: Deployment, folder: RunFolder, info: RunInfo, clock: PhaseTimes) -> tuple[Summary, list[str]]:
    """The summary of the run, and notes on what could not be read from here.

    Checks every trace in MLflow. Writes `summary.json`, and `reward.png` if matplotlib is installed. Raises UserError
    when the MLflow of local services lacks the run or does not answer. For attached services that is a note.
    """
    if not deployment.attached and not info.experiment_id:
        raise UserError(f"expected the run in MLflow, got none; see {folder.log} for the reason")
    notes, output = list[str](), RunOutput.of(folder)
    complete = _complete(deployment, info, output, folder.config().actor_rollout_ref.rollout.trace.backend, notes)
    mlflow_uri = deployment.mlflow_uri or info.mlflow_uri or ""
    if not deployment.attached:  # the server of local services stops with them
        mlflow_uri = f"sqlite:///{deployment.outputs / 'mlflow' / 'mlflow.db'}"
    summary = output.summary(info, clock, mlflow_uri, complete)
    atomic_write(deployment.outputs / "summary.json", summary.model_dump_json(indent=2))
    if importlib.util.find_spec("matplotlib") is not None:
        reward_curve(output.rows, deployment.outputs / REWARD_CURVE, f"GRPO on tiny word problems, {info.run}")
    return summary, notes


def _complete(
    deployment: Deployment, info: RunInfo, output: RunOutput, backends: Sequence[TraceBackend], notes: list[str]
) -> int | None:
    """The number of complete traces. None, with a note, when they cannot be read."""
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
    """The number of traced trajectories with a complete trace in MLflow. Waits up to a deadline for late spans."""
    store = traces.MlflowStore(mlflow_uri, [experiment_id])
    return len(traced) - len(settle(store, traced, TRACES_DEADLINE_S, rule))


def gaps_on_one_machine(tree: traces.TraceTree | None, trajectory: Trajectory) -> list[str]:
    """The gaps of a trace. Each of the five services must also have processes of its own."""
    return [*rules.gaps(tree, trajectory), *(rules.shared_processes(tree) if tree else [])]
