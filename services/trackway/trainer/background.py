"""Jobs that must neither block nor fail training: one thread, a bounded queue, failures counted.

A job that raises NotYet is tried again, after what else is queued, until its patience ends.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("trackway.trainer")

RETRY_S = 0.5
"""Pause between two tries of jobs that are not possible yet."""


class NotYet(Exception):
    """The job may succeed later, for example when a trace has arrived."""


@dataclass(frozen=True)
class _Job:
    run: Callable[[], object]
    give_up_at: float


class Background:
    """Runs jobs one after another in a thread of its own."""

    def __init__(self, name: str, capacity: int = 8192) -> None:
        self.name = name
        self.failed = 0
        """Jobs that raised, or were not possible within their patience."""
        self.dropped = 0
        """Jobs that found the queue full, or were left when the deadline of `close` passed."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(capacity)
        self._pending = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object], patience_s: float = 0.0) -> None:
        """Queue a job; counts it as dropped when the queue is full."""
        try:
            self._jobs.put_nowait(_Job(run, time.monotonic() + patience_s))
        except queue.Full:
            self.dropped += 1

    def close(self, deadline_s: float) -> None:
        """Finish what is queued, at most until the deadline, and say what was lost."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=deadline_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._jobs.qsize() + self._pending
        if self.failed or self.dropped:
            logger.warning("%s: %d jobs failed, %d were dropped", self.name, self.failed, self.dropped)

    def _work(self) -> None:
        early: list[_Job] = []
        more = True
        while more or early:
            try:
                job = self._jobs.get(timeout=RETRY_S if early else None)
            except queue.Empty:
                early = [one for one in early if not self._done(one)]
            else:
                if job is None:
                    more = False
                elif not self._done(job):
                    early.append(job)
            self._pending = len(early)

    def _done(self, job: _Job) -> bool:
        try:
            job.run()
        except NotYet as error:
            if time.monotonic() < job.give_up_at:
                return False
            self._count(error)
        except Exception as error:
            # Whatever it is: a tracking server's trouble must not become the training's.
            self._count(error)
        return True

    def _count(self, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning("%s: %s: %s; later failures are only counted", self.name, type(error).__name__, error)
