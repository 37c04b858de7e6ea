"""`trackway demo`: from nothing to a trained model whose every traced trajectory can be looked at, on a laptop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel

from trackway.deploy import plot, traces, train
from trackway.deploy.errors import UserError
from trackway.deploy.settings import Deployment, UpSettings
from trackway.deploy.traces import rules
from trackway.deploy.traces.verify import settle
from trackway.trainer.config import compose
from trackway.trainer.data import make_tiny
from trackway.trainer.dump import read_trajectories
from trackway.wire.trainer import MetricsRow, RunInfo
from trackway.wire.trajectory import Trajectory

TRAIN_ROWS, HELD_OUT_ROWS = 2000, 256
TRACES_DEADLINE_S = 60.0
"""Longest wait for the last spans to arrive in MLflow."""


class Summary(BaseModel):
    """What the demo leaves in `summary.json`."""

    accuracy_before: float
    accuracy_after: float
    steps: int
    trajectories: int
    traced: int
    complete_traces: int
    failed_trajectories: int
    seconds_total: float
    seconds_training: float
    mlflow_uri: str
    experiment_id: str
    run_id: str


@dataclass
class Clock:
    """Seconds of the demo's parts."""

    started: float
    services_ready: float = 0.0
    trained: float = 0.0


def set_aside(outputs: Path) -> Path | None:
    """Move an earlier demo's folder out of the way, so that nothing of it is lost."""
    if not outputs.exists():
        return None
    aside = outputs.with_name(f"{outputs.name}-{datetime.fromtimestamp(outputs.stat().st_mtime):%Y%m%d-%H%M%S}")
    outputs.rename(aside)
    return aside


def prepare(outputs: Path, seed: int) -> list[str]:
    """Write the demo's data; the overrides that point the run at it."""
    data = outputs / "data"
    make_tiny(data, TRAIN_ROWS, HELD_OUT_ROWS, seed)
    return [f"data.train_files={data / 'train.parquet'}", f"data.val_files={data / 'test.parquet'}"]


def run_name(seed: int) -> str:
    """The run's name, and its folder under the outputs."""
    return f"seed{seed}"


def run(
    deployment: Deployment, settings: UpSettings, seed: int, overrides: list[str], show: Callable[[RunInfo], None]
) -> RunInfo:
    """Train the tiny model with the demo's preset and follow it to the end."""
    data = prepare(deployment.outputs, seed)
    own = [f"trackway.seed={seed}", f"actor_rollout_ref.model.path={settings.model_path.resolve()}"]
    name = run_name(seed)
    config = compose([*data, *own, f"trainer.experiment_name={name}", *overrides], config_name="tiny_demo")
    train.start_run(deployment, config, name)
    return train.follow(deployment, name, show)


def summarise(deployment: Deployment, info: RunInfo, clock: Clock) -> Summary:
    """Count trajectories, look every traced one up in MLflow, and write `summary.json` and `reward.png`."""
    folder = Path(info.folder)
    rows = [MetricsRow.model_validate_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [value for row in rows for key, value in row.data.items() if plot.is_accuracy(key)]
    trajectories = [
        one for file in sorted((folder / "trajectories").glob("*.parquet")) for one in read_trajectories(file)
    ]
    traced = [one for one in trajectories if one.trace_id]
    if not info.experiment_id or not info.run_id or info.mlflow_uri is None:
        raise UserError(f"the run was not logged to MLflow; {folder / 'worker.log'} says why")
    summary = Summary(
        accuracy_before=accuracies[0],
        accuracy_after=accuracies[-1],
        steps=info.step,
        trajectories=len(trajectories),
        traced=len(traced),
        complete_traces=count_complete(info.mlflow_uri, info.experiment_id, traced),
        failed_trajectories=sum(one.error is not None for one in trajectories),
        seconds_total=round(time.monotonic() - clock.started, 1),
        seconds_training=round(clock.trained - clock.services_ready, 1),
        mlflow_uri=f"sqlite:///{deployment.outputs / 'mlflow' / 'mlflow.db'}",
        experiment_id=info.experiment_id,
        run_id=info.run_id,
    )
    (deployment.outputs / "summary.json").write_text(summary.model_dump_json(indent=2))
    plot.reward_curve(
        folder / "metrics.jsonl", deployment.outputs / "reward.png", f"GRPO on tiny word problems, {info.run}"
    )
    return summary


def count_complete(mlflow_uri: str, experiment_id: str, traced: list[Trajectory]) -> int:
    """How many traced trajectories are whole trees in MLflow; waits for the last spans, up to a deadline."""
    store = traces.MlflowStore(mlflow_uri, [experiment_id])
    return len(traced) - len(settle(store, traced, TRACES_DEADLINE_S, _whole))


def _whole(tree: traces.TraceTree | None, one: Trajectory) -> list[str]:
    """Here, on one machine, each of the five services also has processes of its own."""
    return [*rules.gaps(tree, one), *(rules.shared_processes(tree) if tree else [])]
