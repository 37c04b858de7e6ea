"""Where every run of an outputs folder stands, as one service sees it; runs.py changes that.

Everything is on disk, so a restarted service, or the one that takes this one's place on another machine, knows every
run. One of them has an active run: whose process that is says `worker.json`, and whether it lives says heartbeat.py.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from trackway.trainer.heartbeat import DEAD_AFTER_S, Sightings
from trackway.trainer.owner import OutputsLock
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.supervision import Supervised
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunState

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FOLLOW_S = 0.25
"""Pause between two looks at a growing metrics file."""

logger = logging.getLogger("trackway.trainer")

_GONE = "the trainer service went away while the run was active; resume goes on from its last checkpoint"


class KnownRuns:
    """Every run under one outputs folder. Methods raise TrackwayError."""

    def __init__(self, outputs: Path, sightings: Sightings | None = None) -> None:
        self._outputs = outputs
        self._sightings = sightings or Sightings()
        self._active: dict[str, tuple[Supervised, asyncio.Task[None]]] = {}
        self._unreadable: set[str] = set()
        self._ours = OutputsLock(outputs)

    def info(self, name: str) -> RunInfo:
        """Where a run stands."""
        folder = self._existing(name)
        info = folder.info()
        if info.state in ENDED:
            return info
        if name in self._active:
            is_stopping = self._active[name][0].stopping
            return info.model_copy(update={"state": RunState.STOPPING}) if is_stopping else info
        if self._sightings.alive(folder):
            return info
        try:
            return self._give_up(folder)
        except TrackwayError:  # another service decides over it at this moment
            return info

    def list(self) -> list[RunInfo]:
        """Every run whose state can be read, by name."""
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
        """Every run whose state can be read, the one whose state changed last first."""
        for path in sorted(self._outputs.glob("*/state.json"), key=_changed, reverse=True):
            with self._reading(path.parent.name):
                yield self.info(path.parent.name)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A run whose files cannot be read is left out, which is said once: the others are none the worse."""
        try:
            yield
        except (OSError, ValueError, TrackwayError) as error:
            if name not in self._unreadable:
                logger.warning("run %s is left out: %s", name, error)
            self._unreadable.add(name)

    def _give_up(self, folder: RunFolder) -> RunInfo:
        """A run whose process is dead, unless another service has it by now."""
        with self._ours.held():
            info = folder.info()
            if info.state in ENDED or self._sightings.alive(folder):
                return info
            folder.disown()
            was_wanted = info.interrupted or info.state is not RunState.STOPPING
            return folder.move(RunState.FAILED, _GONE, interrupted=was_wanted)

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
            known = ", ".join(sorted(path.parent.name for path in self._outputs.glob("*/state.json"))) or "none"
            raise TrackwayError(ErrorCode.NOT_FOUND, f"no run {name!r}; the runs are: {known}", run=name)
        return folder

    def _folder(self, name: str) -> RunFolder:
        if RUN_NAME.fullmatch(name) is None:
            message = f"expected a run name of at most 128 letters, digits, '.', '_', '-', got {name!r}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return RunFolder(self._outputs / name)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
