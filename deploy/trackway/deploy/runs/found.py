"""The runs of an outputs folder: asked from the trainer service if one runs, else read from their files."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trackway.clients import run
from trackway.clients.trainer import TrainerClient
from trackway.deploy.deployment.attach import folder_here
from trackway.deploy.deployment.record import Deployment, find_running
from trackway.system.user_error import UserError
from trackway.trainer.run_state.folder import RunFolder, outputs_folders, run_folders
from trackway.wire.trainer import MetricsRow, RunInfo

REWARD = "critic/score/mean"


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
        """Whether it is an evaluation of this machine."""
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
    """The mean reward of each step that has one."""
    values = (row.data.get(REWARD) for row in rows)
    return [value for value in values if value is not None and math.isfinite(value)]


def idle_time(rows: Sequence[MetricsRow]) -> str:
    """How long each side of the run waited for the other, as a sentence. Empty before the first step."""
    steps, learner = _total(rows, "timing_s/step"), _total(rows, "timing_s/gen")
    rollouts = _total(rows, "fully_async/rollouter/version_time") - _total(rows, "fully_async/rollouter/active_time")
    if not steps:
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
    """When its state changed last, in seconds since 1970. Later than any for a run on another machine."""
    try:
        return (found.outputs.resolve() / found.info.run / "state.json").stat().st_mtime
    except OSError:
        return math.inf
