"""`trackway demo --attached`: the demo on remote services, started by a user or a Kubernetes Job.

An active run of the same seed is followed. A stopped run is resumed if its settings are the same. Otherwise a new run
starts under the next free name: seed0, seed0-2, seed0-3, ...

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
from trackway.deploy.runs.demo import Clock, RunOutput, Summary
from trackway.deploy.runs.standalone import changed_since
from trackway.system.user_error import UserError
from trackway.traces import rules
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.data import make_tiny
from trackway.wire.tracing import TraceBackend
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunState


@dataclass(frozen=True)
class AttachedDemo:
    """The demo's run on attached services."""

    deployment: Deployment
    seed: int
    data_dir: Path | None
    """A folder that the services mount under the same path."""
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
            words += demo.data_words(self._rows)
        if not self._given("actor_rollout_ref.model.path"):
            if self.model_path is None:
                raise UserError(
                    "--model-path: expected the model's path or id as the services see it, got none; give it, or set "
                    "TRACKWAY_MODEL_PATH to the services' value"
                )
            words.append(f"actor_rollout_ref.model.path={self.model_path}")
        return launch.elsewhere(compose([*words, *self.overrides], config_name="tiny_demo"))

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
            make_tiny(self._rows, demo.TRAIN_ROWS, demo.HELD_OUT_ROWS, self.seed)
        except OSError as error:
            raise UserError(
                f"--data-dir: expected a folder on the services' volume that is writable from here, got "
                f"{self.data_dir} ({error}); otherwise write the dataset on the volume with `trackway data make-tiny` "
                "and give data.train_files=... and data.val_files=..."
            ) from error

    def _may_go_on(self, info: RunInfo) -> bool:
        stopped = info.interrupted or info.state in (RunState.STOPPING, RunState.STOPPED)
        folder = folder_here(info) if stopped else None
        return folder is not None and not changed_since(folder, self._config(info.run))


def runs(deployment: Deployment) -> list[RunInfo]:
    """All runs of the services."""
    return run(_trainer(deployment).runs())


def newest_of(seed: int, known: Sequence[RunInfo]) -> tuple[RunInfo | None, str]:
    """The seed's newest run, if any, and the next free name."""
    pattern = re.compile(rf"{demo.run_name(seed)}(?:-(\d+))?")
    numbered = {int(match[1] or 1): info for info in known if (match := pattern.fullmatch(info.run))}
    last = max(numbered, default=0)
    return numbered.get(last), f"{demo.run_name(seed)}-{last + 1}" if last else demo.run_name(seed)


def summarise(deployment: Deployment, info: RunInfo, clock: Clock) -> tuple[Summary, list[str]]:
    """The summary of the run, and notes on what could not be read from here. Writes `summary.json`, and `reward.png`
    if matplotlib is installed.
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
        output = RunOutput.of(folder)
        backends = folder.config().actor_rollout_ref.rollout.trace.backend
        complete = _complete(mlflow_uri, info, output, backends, notes)
        summary = output.summary(info, clock, mlflow_uri, complete)
    with_curve = importlib.util.find_spec("matplotlib") is not None
    demo.keep(summary, output.rows, deployment.outputs, info.run, with_curve)
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
    mlflow_uri: str, info: RunInfo, output: RunOutput, backends: Sequence[TraceBackend], notes: list[str]
) -> int | None:
    """The number of complete traces; None, with a note, when they cannot be read."""
    if not (mlflow_uri and info.experiment_id) or TraceBackend.MLFLOW not in backends:
        notes.append("traces were not checked: the address of their MLflow is unknown here")
        return None
    try:
        return demo.count_complete(mlflow_uri, info.experiment_id, output.traced, rules.gaps)
    except (UserError, ModuleNotFoundError) as error:
        notes.append(f"traces were not checked: {error}")
        return None


async def _rows_of(deployment: Deployment, name: str) -> list[MetricsRow]:
    return [row async for row in _trainer(deployment).metrics(name)]


def _trainer(deployment: Deployment) -> TrainerClient:
    return TrainerClient(f"{deployment.base_url}/trainer")
