"""Jobs that must neither block nor fail training: one thread, a bounded queue, failures counted.

A job that raises NotYet is tried again, after pauses that grow, until its patience ends.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger("trackway.trainer")

FIRST_PAUSE_S = 0.5
"""Before a job that is not possible yet is tried again; doubled each time."""
LONGEST_PAUSE_S = 4.0
CLOSING_PATIENCE_S = 15.0
"""For what is not possible yet when the run ends; longer than a trace takes to arrive."""


class NotYet(Exception):
    """The job may succeed later, for example when a trace has arrived."""


@dataclass
class _Job:
    run: Callable[[], object]
    give_up_at: float
    pause: float = FIRST_PAUSE_S
    due_at: float = 0.0


class Background:
    """Runs jobs one after another in a thread of its own."""

    def __init__(self, name: str, capacity: int = 8192) -> None:
        self.name = name
        self.failed = 0
        """Jobs that raised, or were not possible within their patience."""
        self.dropped = 0
        """Jobs that found the queue full, or were left when the deadline of `close` passed."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(capacity)
        self._latest = float("inf")
        self.waiting = 0
        """Jobs that were not possible yet and are tried again."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object], patience_s: float = 0.0) -> None:
        """Queue a job; counts it as dropped when the queue is full."""
        try:
            self._jobs.put_nowait(_Job(run, time.monotonic() + patience_s))
        except queue.Full:
            self.dropped += 1

    def close(self, deadline_s: float) -> None:
        """Finish what is queued, at most until the deadline, and say what was lost.

        What is not possible yet has `CLOSING_PATIENCE_S` from now: a backend that is away must not hold up the end.
        """
        end = time.monotonic() + deadline_s
        self._latest = time.monotonic() + CLOSING_PATIENCE_S
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=deadline_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._jobs.qsize() + self.waiting
        if self.failed or self.dropped:
            logger.warning("%s: %d jobs failed, %d were dropped", self.name, self.failed, self.dropped)

    def _work(self) -> None:
        early: list[_Job] = []
        more = True
        while more or early:
            try:
                job = self._jobs.get(timeout=_until_due(early))
            except queue.Empty:
                early = [one for one in early if one.due_at > time.monotonic() or not self._done(one)]
            else:
                if job is None:
                    more = False
                elif not self._done(job):
                    self._keep(job, early)
            self.waiting = len(early)

    def _keep(self, job: _Job, early: list[_Job]) -> None:
        if len(early) < self._jobs.maxsize:
            early.append(job)
        else:
            self.dropped += 1

    def _done(self, job: _Job) -> bool:
        try:
            job.run()
        except NotYet as error:
            now, give_up_at = time.monotonic(), min(job.give_up_at, self._latest)
            if now < give_up_at:
                job.due_at = min(now + job.pause, give_up_at)
                job.pause = min(LONGEST_PAUSE_S, job.pause * 2)
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


def _until_due(waiting: Sequence[_Job]) -> float | None:
    """Seconds until the first of them is due; None without any."""
    return max(0.0, min(one.due_at for one in waiting) - time.monotonic()) if waiting else None
