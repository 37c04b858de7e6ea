"""The runs of an outputs folder: asked from the trainer service if one runs, else read from their files.

`parts` lists what can be made again, and `remove` deletes it.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trackway.clients import run
from trackway.clients.trainer import TrainerClient
from trackway.deploy.deployment.attach import folder_here
from trackway.deploy.deployment.record import Deployment, find_running
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder, outputs_folders, run_folders
from trackway.trainer.run_state.heartbeat import LivenessMonitor
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo

REWARD = "critic/score/mean"
LOSS, OWN_LOSS = "train/loss", "actor/loss_sum"
"""The losses of supervised training and of a loop over Tinker's API."""


@dataclass(frozen=True)
class FoundRun:
    """A run, and the outputs folder that holds it or that is attached to its services."""

    info: RunInfo
    outputs: Path
    services: Deployment | None
    """The running services that answered for it, or None when it was read from its files."""

    @property
    def log(self) -> Path | None:
        """The log of its process, or None when it lies on another machine."""
        return None if self.services is not None and self.services.attached else self.folder.log

    @property
    def is_evaluation(self) -> bool:
        """Return whether it is an evaluation of this machine."""
        return RunFolder(self.outputs.resolve() / self.info.run).is_evaluation

    @property
    def folder(self) -> RunFolder:
        """Its folder. Raises UserError when this machine does not mount the services' volume."""
        if self.services is None or not self.services.attached:
            return RunFolder(self.outputs.resolve() / self.info.run)
        folder = folder_here(self.info)
        if folder is None:
            raise UserError(
                f"expected the folder of run {self.info.run} on this machine, but {self.info.folder} is on the "
                "services' machines; run this command there"
            )
        return folder

    def rows(self) -> list[MetricsRow]:
        """The metrics of its steps."""
        if self.services is None or not self.services.attached:
            return self.folder.rows()
        client = TrainerClient(self.services.url("trainer"))

        async def read() -> list[MetricsRow]:
            return [row async for row in client.metrics(self.info.run)]

        return run(read())


def find_runs(outputs: Path) -> list[FoundRun]:
    """The runs of the folder, and of the outputs folders directly in it (`outputs/demo`), the newest first."""
    found = [found_run for folder in outputs_folders(outputs) for found_run in _runs_of(folder)]
    return sorted(found, key=_changed, reverse=True)


def find_run(outputs: Path, name: str | None) -> FoundRun:
    """The run of that name, or the newest that is no evaluation.

    Raises UserError when there is none, or two outputs folders have one.
    """
    found = find_runs(outputs)
    if not found:
        raise UserError(
            f"expected a run in {outputs}, found none; start one with `trackway train`, or give another --outputs"
        )
    if name is None:
        trained = next((found_run for found_run in found if not found_run.is_evaluation), None)
        if trained is None:
            raise UserError(f"expected a training run in {outputs}, found evaluations only; give the name of one")
        return trained
    named = [found_run for found_run in found if found_run.info.run == name]
    if len(named) == 1:
        return named[0]
    if named:
        folders = " and ".join(str(found_run.outputs) for found_run in named)
        raise UserError(f"expected one run {name!r}, got one in each of {folders}; give --outputs")
    known = ", ".join(dict.fromkeys(found_run.info.run for found_run in found))
    raise UserError(f"expected a run of {outputs} ({known}), got {name!r}; give its name, or another --outputs")


def rewards(rows: Sequence[MetricsRow]) -> list[float]:
    """The mean reward of each step that has one, or the loss where there is no reward."""
    values = (row.data[name] for row in rows for name in (REWARD, LOSS, OWN_LOSS) if name in row.data)
    return [value for value in values if math.isfinite(value)]


def idle_time(rows: Sequence[MetricsRow]) -> str:
    """Return how long each side of the run waited for the other, as a sentence. Empty without steps or rollouts."""
    steps, learner = _total(rows, "timing_s/step"), _total(rows, "timing_s/gen")
    rollouts = _total(rows, "fully_async/rollouter/version_time") - _total(rows, "fully_async/rollouter/active_time")
    if not steps or not learner:
        return ""
    return (
        f"in {steps:.0f} s of steps the learner waited {learner:.0f} s for rollouts ({learner / steps:.0%}), and for "
        f"{rollouts:.0f} s ({rollouts / steps:.0%}) no rollout was requested"
    )


def _total(rows: Sequence[MetricsRow], name: str) -> float:
    values = (row.data.get(name, 0.0) for row in rows if "timing_s/step" in row.data)
    return sum(value for value in values if math.isfinite(value))


def _runs_of(outputs: Path) -> Iterator[FoundRun]:
    deployment = find_running(outputs)
    infos = [] if deployment is None else run(TrainerClient(deployment.url("trainer")).runs())
    yield from (FoundRun(info, outputs, deployment) for info in infos)
    known = {info.run for info in infos}
    for folder in run_folders(outputs):
        # The trainer of attached services does not know the evaluations of this machine.
        if folder.name not in known and (deployment is None or folder.is_evaluation):
            yield FoundRun(folder.info(), outputs, None)


def _changed(found: FoundRun) -> float:
    """Return when the run's state changed last, in seconds since 1970. Infinite for a run on another machine."""
    try:
        return (found.outputs.resolve() / found.info.run / "state.json").stat().st_mtime
    except OSError:
        return math.inf


_REMADE = {"weights": "published weights, which a run publishes again", ".deployment": "logs of services"}
_KEPT = {"mlflow": "metrics and traces", "spool": "traces and metrics not delivered yet"}


@dataclass(frozen=True)
class Part:
    """A file or folder of an outputs folder."""

    path: Path
    what: str
    size: int
    """Bytes."""


def parts(outputs: Path, everything: bool) -> list[Part]:
    """Files that `clean` removes: those that can be made again; with `everything` also runs, metrics and traces.

    Raises:
        UserError: the folder belongs to no deployment, or services or a run use it.
    """
    runs = [RunFolder(path) for path in _inside(outputs) if RunFolder(path).exists]
    if not runs and not (outputs / ".deployment").is_dir():  # other folders may have `weights` of their own
        raise UserError(f"expected an outputs folder of trackway, got {outputs}; give --outputs")
    running = find_running(outputs)
    if running is not None:
        raise UserError(f"services use {outputs}; stop them first: `trackway down --outputs {outputs}`")
    active = [run.name for run in runs if run.info().state not in ENDED and LivenessMonitor().alive(run)]
    if active:
        raise UserError(f"run {active[0]} is active in {outputs}; stop it first")
    found = [(outputs / name, what) for name, what in _REMADE.items()]
    found += [(path, "damaged checkpoint") for run in runs for path in sorted(run.checkpoints.glob("damaged_*"))]
    if everything:
        found = [(outputs / name, what) for name, what in {**_REMADE, **_KEPT}.items()]
        found += [(run.path, "a run, with its checkpoints") for run in runs]
    return [Part(path, what, _size(path)) for path, what in found if path.exists()]


def remove(found: list[Part]) -> None:
    """Remove the parts."""
    for part in found:
        if part.path.is_dir() and not part.path.is_symlink():
            shutil.rmtree(part.path)
        else:
            part.path.unlink(missing_ok=True)


def _inside(outputs: Path) -> list[Path]:
    return sorted(outputs.iterdir()) if outputs.is_dir() else []


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    return path.lstat().st_size
