"""Where every run of an outputs folder stands, as one service sees it; runs.py changes that.

Everything is on disk, so a restarted service, or the one that takes this one's place on another machine, knows every
run. One of them has an active run: whose process that is says `worker.json`, and whether it lives says heartbeat.py.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from trackway.system import StorageError, storage_problem
from trackway.trainer.run_state.folder import STATE, RunFolder
from trackway.trainer.run_state.heartbeat import DEAD_AFTER_S, LivenessMonitor
from trackway.trainer.run_state.ownership import OutputsLock
from trackway.trainer.supervisor.process import Supervised
from trackway.trainer.tracking import with_tracking
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.names import RESERVED_NAMES, checked_run_name
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunState

FOLLOW_S = 0.25
"""Pause between two looks at a growing metrics file."""

logger = logging.getLogger("trackway.trainer")

_GONE = "the trainer service went away while the run was active; resume goes on from its last checkpoint"
_WRITES_AGAIN = "its state file cannot be read; its process lives and writes it again after the step"


class RunRegistry:
    """Every run under one outputs folder. Methods raise TrackwayError."""

    def __init__(self, outputs: Path, sightings: LivenessMonitor | None = None) -> None:
        self._outputs = outputs
        self._sightings = sightings or LivenessMonitor()
        self._active: dict[str, tuple[Supervised, asyncio.Task[None]]] = {}
        self._left_out: set[str] = set()
        self._ours = OutputsLock(outputs)

    def info(self, name: str) -> RunInfo:
        """Where a run stands."""
        folder = self._existing(name)
        info = folder.info()
        if info.state is RunState.UNREADABLE and (name in self._active or self._sightings.alive(folder)):
            info = info.model_copy(update={"state": RunState.RUNNING, "message": _WRITES_AGAIN})
        if info.state in ENDED:
            return info
        if name in self._active:
            supervised = self._active[name][0]
            state = RunState.STOPPING if supervised.stopping else info.state
            return _on_its_disk(info.model_copy(update={"state": state}), folder, supervised.unwritten)
        if self._sightings.alive(folder):
            return _on_its_disk(info, folder)
        try:
            return self._give_up(folder)
        except StorageError as error:
            return _on_its_disk(info, folder, error)
        except TrackwayError:  # another service decides over it at this moment
            return info

    def tracked(self, info: RunInfo) -> RunInfo:
        """The run with what MLflow and the other backends do not have of it by now."""
        return with_tracking(info, self._folder(info.run))

    def list(self) -> list[RunInfo]:
        """Every run, by name."""
        return sorted(self._newest_first(), key=lambda info: info.run)

    def newest(self) -> RunInfo | None:
        """The active run, or else the one whose state changed last."""
        last = None
        for info in self._newest_first():
            if info.state not in ENDED:
                return info
            last = last or info
        return last

    async def rows(self, name: str, follow: bool) -> AsyncIterator[MetricsRow]:
        """The run's metrics; with `follow`, new rows too until the run has ended.

        After a restart from a checkpoint, rows that were given before are not given again.
        """
        folder = self._existing(name)
        newest = -1
        while True:
            last_look = not follow or self.info(name).state in ENDED
            for row in folder.rows():
                if row.step > newest:
                    newest = row.step
                    yield row
            if last_look:
                return
            await asyncio.sleep(FOLLOW_S)

    def _newest_first(self) -> Iterator[RunInfo]:
        """Every run, the one whose state changed last first."""
        for folder in sorted(self._folders(), key=_changed, reverse=True):
            with self._reading(folder.name):
                yield self.info(folder.name)

    def _folders(self) -> Iterator[RunFolder]:
        """Those of the outputs that a run was started in."""
        if self._outputs.is_dir():
            folders = (RunFolder(path) for path in self._outputs.iterdir() if path.is_dir())
            yield from (folder for folder in folders if folder.exists and folder.name not in RESERVED_NAMES)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A run that an error concerns is left out, which is said once: the others are none the worse."""
        try:
            yield
        except (OSError, TrackwayError) as error:
            if name not in self._left_out:
                logger.warning("run %s is left out: %s", name, error)
            self._left_out.add(name)
        else:
            self._left_out.discard(name)

    def _give_up(self, folder: RunFolder) -> RunInfo:
        """A run whose process is dead, unless another service has it by now.

        StorageError when that cannot be written: on a full disk a process can give no sign of life either.
        """
        with self._ours.held():
            info = folder.info()
            if info.state in ENDED or self._sightings.alive(folder):
                return info
            problem = storage_problem(folder.path)
            if problem is not None:
                raise problem
            folder.disown()
            was_wanted = info.interrupted or info.state is not RunState.STOPPING
            return folder.move(RunState.FAILED, _GONE, interrupted=was_wanted)

    def _require_settled(self, info: RunInfo) -> None:
        """Raise StorageError when a run only seems to be active, since its end cannot be written."""
        if info.run in self._active:
            unwritten = self._active[info.run][0].unwritten
            if unwritten is not None:
                raise unwritten
        elif info.state not in ENDED and not self._sightings.alive(self._folder(info.run)):
            self._give_up(self._folder(info.run))

    def _standing(self, info: RunInfo) -> str:
        """The state, and of a run that another service has, where, and what helps if that is gone."""
        owner = self._folder(info.run).owner()
        if info.state in ENDED or info.run in self._active or owner is None:
            return info.state
        return (
            f"{info.state} in another trainer service, on {owner.machine.host} (stop it there; should that be gone, "
            f"it shows after {DEAD_AFTER_S:.0f} s without a sign of life: ask again then)"
        )

    def _existing(self, name: str) -> RunFolder:
        folder = self._folder(name)
        if not folder.exists:
            known = ", ".join(sorted(one.name for one in self._folders())) or "none"
            raise TrackwayError(ErrorCode.NOT_FOUND, f"no run {name!r}; the runs are: {known}", run=name)
        return folder

    def _folder(self, name: str) -> RunFolder:
        try:
            return RunFolder(self._outputs / checked_run_name(name))
        except ValueError as error:
            raise TrackwayError(ErrorCode.INVALID_REQUEST, str(error)) from error


def _on_its_disk(info: RunInfo, folder: RunFolder, unwritten: StorageError | None = None) -> RunInfo:
    """Where an active run stands, and that its disk takes no files: its process may not be able to say so."""
    if unwritten is not None:
        return info.model_copy(update={"message": f"its process has ended and its state waits: {unwritten.message}"})
    problem = None if info.message else storage_problem(folder.path)
    return info if problem is None else info.model_copy(update={"message": f"its disk is full: {problem.message}"})


def _changed(folder: RunFolder) -> float:
    try:
        return (folder.path / STATE).stat().st_mtime
    except OSError:
        return 0.0
