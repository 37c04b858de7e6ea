"""`trackway demo --attached`: the demo on services that run elsewhere, as a person or a Job on Kubernetes starts it.

A run of the same seed that is active is followed. One that was stopped goes on if its settings are the same. Else a new
one starts under the next free name: seed0, seed0-2, seed0-3, ...

info, done = demo.start()
info = demo.follow(info, show)
summary, notes = summarise(demo.deployment, info, clock)
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trackway.clients import TrainerClient, run
from trackway.deploy.deployment.attach import folder_here
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs import demo, launch
from trackway.deploy.runs.demo import Clock, Made, Summary
from trackway.deploy.runs.standalone import changed_since
from trackway.system.user_error import UserError
from trackway.traces import rules
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.data import make_tiny
from trackway.wire.tracing import TraceBackend
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunState


@dataclass(frozen=True)
class AttachedDemo:
    """What is to be trained there."""

    deployment: Deployment
    seed: int
    data_dir: Path | None
    """A folder that the services read under the same path."""
    model_path: str | None
    """The services' model, as they know it."""
    overrides: list[str]

    def start(self) -> tuple[RunInfo, str]:
        """The run, and what was done: followed, resumed or started. Raises UserError and TrackwayError."""
        newest, free = newest_of(self.seed, runs(self.deployment))
        config = self._config(free)
        if newest and self._may_go_on(newest):
            return launch.resume_run(self.deployment, newest.run), f"run {newest.run} goes on from its last checkpoint"
        if newest and newest.state not in ENDED:
            return newest, f"run {newest.run} is {newest.state} already: following it"
        if not self._given("data.train_files"):
            self._write_rows()
        return launch.start_run(self.deployment, config, free), f"run {free} starts"

    def follow(self, info: RunInfo, show: launch.Show) -> RunInfo:
        """As `launch.follow`; raises UserError for a run that somebody stopped, too."""
        info = launch.follow(self.deployment, info.run, show)
        if info.state is not RunState.FINISHED:
            raise UserError(
                f"run {info.run} was stopped at step {info.step} of {info.total_steps}; the same command goes on "
                "with it"
            )
        return info

    def _config(self, name: str) -> RunConfig:
        words = [f"trackway.seed={self.seed}", f"trainer.experiment_name={name}"]
        if not self._given("data.train_files"):
            words += demo.data_words(self._rows)
        if not self._given("actor_rollout_ref.model.path"):
            if self.model_path is None:
                raise UserError(
                    "--model-path: expected the services' model as they know it, got none; give it, or set "
                    "TRACKWAY_MODEL_PATH as it is set for them"
                )
            words.append(f"actor_rollout_ref.model.path={self.model_path}")
        return launch.elsewhere(compose([*words, *self.overrides], config_name="tiny_demo"))

    def _given(self, key: str) -> bool:
        return any(word.lstrip("+").partition("=")[0] == key for word in self.overrides)

    @property
    def _rows(self) -> Path:
        if self.data_dir is None:
            raise UserError(
                "--data-dir: expected a folder of the services' volume for the demo's rows, got none; give one, such "
                "as /var/lib/trackway/data, or data.train_files=... and data.val_files=... that are there already"
            )
        return self.data_dir / f"tiny-seed{self.seed}"

    def _write_rows(self) -> None:
        try:
            make_tiny(self._rows, demo.TRAIN_ROWS, demo.HELD_OUT_ROWS, self.seed)
        except OSError as error:
            raise UserError(
                f"--data-dir: expected a folder of the services' volume that can be written from here, got "
                f"{self.data_dir} ({error}); where there is none, write the rows there with `trackway data make-tiny` "
                "and give data.train_files=... and data.val_files=..."
            ) from error

    def _may_go_on(self, info: RunInfo) -> bool:
        stopped = info.interrupted or info.state in (RunState.STOPPING, RunState.STOPPED)
        folder = folder_here(info) if stopped else None
        return folder is not None and not changed_since(folder, self._config(info.run))


def runs(deployment: Deployment) -> list[RunInfo]:
    """Every run of the services."""
    return run(_trainer(deployment).runs())


def newest_of(seed: int, known: Sequence[RunInfo]) -> tuple[RunInfo | None, str]:
    """The seed's newest run, if any, and the next free name."""
    pattern = re.compile(rf"{demo.run_name(seed)}(?:-(\d+))?")
    numbered = {int(found[1] or 1): info for info in known if (found := pattern.fullmatch(info.run))}
    last = max(numbered, default=0)
    return numbered.get(last), f"{demo.run_name(seed)}-{last + 1}" if last else demo.run_name(seed)


def summarise(deployment: Deployment, info: RunInfo, clock: Clock) -> tuple[Summary, list[str]]:
    """What the run did, and a sentence for each thing that cannot be seen from here; writes `summary.json`, and
    `reward.png` where matplotlib is installed.
    """
    notes: list[str] = []
    folder, mlflow_uri = folder_here(info), deployment.mlflow_uri or info.mlflow_uri or ""
    if folder is None:
        made = Made(run(_rows_of(deployment, info.run)), [])
        notes.append(
            f"{info.folder} is not visible from here: the counts are those of the trainer's metrics, validation left "
            "out, and no trace was looked at"
        )
        summary = made.summary(info, clock, mlflow_uri, None).model_copy(update=_counts(made.rows, info))
    else:
        made = Made.of(folder)
        backends = folder.config().actor_rollout_ref.rollout.trace.backend
        complete = _complete(mlflow_uri, info, made, backends, notes)
        summary = made.summary(info, clock, mlflow_uri, complete)
    with_curve = importlib.util.find_spec("matplotlib") is not None
    demo.keep(summary, made.rows, deployment.outputs, info.run, with_curve)
    return summary, notes


def _counts(rows: Sequence[MetricsRow], info: RunInfo) -> dict[str, int]:
    """Of trajectories, by the metrics."""

    def total(*names: str) -> int:
        return int(sum(value for row in rows for name, value in row.data.items() if name.startswith(names)))

    return {
        "trajectories": total("training/trajectories", "training/left_out/"),
        "failed_trajectories": total("training/rollout_failure/failed_trajectories", "val-aux/failed_trajectories"),
        "traced": info.traces.trajectories if info.traces else 0,
    }


def _complete(
    mlflow_uri: str, info: RunInfo, made: Made, backends: Sequence[TraceBackend], notes: list[str]
) -> int | None:
    """How many traces are whole; None, and a note, where they cannot be looked at."""
    if not (mlflow_uri and info.experiment_id) or TraceBackend.MLFLOW not in backends:
        notes.append("the traces are not in an MLflow that is known here: none was looked at")
        return None
    try:
        return demo.count_complete(mlflow_uri, info.experiment_id, made.traced, rules.gaps)
    except (UserError, ModuleNotFoundError) as error:
        notes.append(f"no trace was looked at: {error}")
        return None


async def _rows_of(deployment: Deployment, name: str) -> list[MetricsRow]:
    return [row async for row in _trainer(deployment).metrics(name)]


def _trainer(deployment: Deployment) -> TrainerClient:
    return TrainerClient(f"{deployment.base_url}/trainer")
