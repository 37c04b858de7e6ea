"""A background queue for jobs that must neither block training nor make it fail."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("trackway.trainer")


class JobQueue:
    """Runs jobs in order in its own thread, from a bounded queue; failures are counted."""

    def __init__(self, name: str, capacity: int = 8192) -> None:
        self.name = name
        self.failed = 0
        """Jobs that raised."""
        self.dropped = 0
        """Jobs that did not fit in the queue, or were left at the deadline of `close`."""
        self.reason = ""
        """Error of the last failed job."""
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object]) -> None:
        """Queue a job, or count it as dropped when the queue is full."""
        try:
            self._jobs.put_nowait(run)
        except queue.Full:
            self.dropped += 1

    def close(self, deadline_s: float) -> None:
        """Run the queued jobs until the deadline, and log how many were lost."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=deadline_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._jobs.qsize()
        if self.failed or self.dropped:
            logger.warning("%s: %d jobs failed, %d were dropped", self.name, self.failed, self.dropped)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                # Any error: the failure of a tracking backend must not stop training.
                self.failed += 1
                self.reason = f"{type(error).__name__}: {error}"
                if self.failed == 1:
                    logger.warning("%s: %s; later failures are only counted", self.name, self.reason)
