"""Liveness of the process that owns a run, detected across machines through the run's folder alone.

On the owner's machine, /proc tells whether it is alive. On other machines, a reader checks whether the count in
`heartbeat.json` increases, by the reader's own clock, since clocks of different machines are never compared. A process
that was suspended and marked dead finds another owner in `worker.json`, or no file, and exits. It checks before every
change of the run's state and rows, and at every beat: until then, for 3 s at most, it may compute and write rollouts or
a checkpoint.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from trackway.trainer.run_state.folder import Beat, Machine, Owner, RunFolder, this_machine

EXIT_FAILED = 3
"""The run has FAILED. A restart would fail again."""
EXIT_LOST = 4
"""Another process owns the run."""
EXIT_STORAGE = 5
"""The disk is full or cannot be written. The run can be resumed."""


BEAT_S = 3.0
"""Interval between beats."""
DEAD_AFTER_S = 30.0
"""Time without a new beat after which a process on another machine is considered dead."""

logger = logging.getLogger("trackway.trainer")


class _LastBeat(NamedTuple):
    owner: Owner
    beats: int
    at: float


class LivenessMonitor:
    """Tracks the beats of the runs' processes for one service. `clock` returns monotonic seconds."""

    def __init__(self, machine: Machine | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = machine or this_machine()
        self._clock = clock
        self._last_beats: dict[str, _LastBeat] = {}

    def alive(self, folder: RunFolder) -> bool:
        """Return whether the run's process is alive. A process on another machine counts as alive on the first
        check."""
        now = self._clock()  # before the read, so that a stalled file server does not count against the process
        owner = folder.owner()
        if owner is None:
            return False
        if owner.machine == self.machine:
            return owner.lives_here
        beats = folder.beats(owner)
        last = self._last_beats.get(folder.name)
        if last is None or last.owner != owner or beats > last.beats:
            self._last_beats[folder.name] = last = _LastBeat(owner, beats, now)
        return now - last.at < DEAD_AFTER_S


def exit_if_lost(folder: RunFolder) -> None:
    """Exit this process unless it owns the run."""
    owner = folder.owner()
    if Owner.of(os.getpid()) == owner:
        return
    logger.error("this process was marked dead and lost ownership of the run (now owned by: %s); exiting", owner)
    logging.shutdown()
    os._exit(EXIT_LOST)


class Heartbeat:
    """`with Heartbeat(folder):` makes this process the run's owner. A thread writes its beats while others compute."""

    def __init__(self, folder: RunFolder, every_s: float = BEAT_S) -> None:
        self._folder = folder
        self._every_s = every_s
        self._beat = Beat(owner=Owner.of(os.getpid()), count=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_periodically, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._folder.write_owner(self._beat.owner)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop the beats. None is written afterwards."""
        self._stop.set()
        self._thread.join()

    def _beat_periodically(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._write_beat()
            except OSError:
                logger.warning("the heartbeat could not be written to %s", self._folder.path, exc_info=True)

    def _write_beat(self) -> None:
        exit_if_lost(self._folder)
        self._beat = self._beat.model_copy(update={"count": self._beat.count + 1})
        self._folder.write_beat(self._beat)
