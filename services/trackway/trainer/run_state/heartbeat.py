"""Whether the process that has a run lives, told across machines by nothing but the run's folder.

On its own machine /proc knows. Elsewhere a pid means nothing: there a reader sees whether its beat in `heartbeat.json`
goes on, by the reader's own clock, as no two machines' clocks are compared. A process that stood still for so long that
it was taken for dead finds another one's name in the file, or no file, and ends. It looks before every change of the
run's state and rows, and at every beat: until that, 3 s at most, it may compute, and write rollouts or a checkpoint.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from trackway.trainer.run_state.exit_status import EXIT_LOST
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.ownership import Beat, Machine, Owner, this_machine
from trackway.wire.trainer import MetricsRow, RunInfo, RunState

BEAT_S = 3.0
"""Pause between two beats."""
DEAD_AFTER_S = 30.0
"""A process on another machine whose beat has not changed for so long is dead."""
"""Exit status of a process whose run was given up as dead, or another one has taken."""

logger = logging.getLogger("trackway.trainer")


class _Seen(NamedTuple):
    owner: Owner
    beats: int
    at: float


class LivenessMonitor:
    """What one service has seen of the runs' processes; `clock` gives monotonic seconds."""

    def __init__(self, machine: Machine | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = machine or this_machine()
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def alive(self, folder: RunFolder) -> bool:
        """Whether the run's process lives; one elsewhere that was never looked at before counts as alive."""
        now = self._clock()  # before the look: a file server that stands still is no silence of the process
        owner = folder.owner()
        if owner is None:
            return False
        if owner.machine == self.machine:
            return owner.lives_here
        beats = folder.beats(owner)
        last = self._seen.get(folder.name)
        if last is None or last.owner != owner or beats > last.beats:
            self._seen[folder.name] = last = _Seen(owner, beats, now)
        return now - last.at < DEAD_AFTER_S


class OwnFolder(RunFolder):
    """A run's folder in the run's own process, which ends instead of writing when it has lost the run."""

    def info(self) -> RunInfo:
        """Where the run stands; it starts when its state file could never be read here."""
        info = super().info()
        if info.state is not RunState.UNREADABLE:
            return info
        return info.model_copy(update={"state": RunState.STARTING, "message": ""})

    def append_row(self, row: MetricsRow) -> None:
        """Add the metrics of a step."""
        end_if_lost(self)
        super().append_row(row)

    def rewind(self, row: MetricsRow | None) -> None:
        """Make `row` the last one."""
        end_if_lost(self)
        super().rewind(row)

    def _write(self, info: RunInfo) -> RunInfo:
        end_if_lost(self)
        return super()._write(info)


def end_if_lost(folder: RunFolder) -> None:
    """End this process unless the folder names it as the one that has the run."""
    found = folder.owner()
    if Owner.of(os.getpid()) == found:
        return
    logger.error("this process was taken for dead and has the run no more, it ends; by now the run has: %s", found)
    logging.shutdown()
    os._exit(EXIT_LOST)


class Heartbeat:
    """`with Heartbeat(folder):` this process has the run; a thread says so, also while the others compute."""

    def __init__(self, folder: RunFolder, every_s: float = BEAT_S) -> None:
        self._folder = folder
        self._every_s = every_s
        self._beat = Beat(owner=Owner.of(os.getpid()), count=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._folder.write_owner(self._beat.owner)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Afterwards no beat is written any more."""
        self._stop.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._live()
            except OSError:
                logger.warning("no sign of life could be written to %s", self._folder.path, exc_info=True)

    def _live(self) -> None:
        end_if_lost(self._folder)
        self._beat = self._beat.model_copy(update={"count": self._beat.count + 1})
        self._folder.write_beat(self._beat)
