"""Jobs that must neither block nor fail training: one thread, a bounded queue, failures counted."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("trackway.trainer")


class JobQueue:
    """Runs jobs one after another in a thread of its own."""

    def __init__(self, name: str, capacity: int = 8192) -> None:
        self.name = name
        self.failed = 0
        """Jobs that raised."""
        self.dropped = 0
        """Jobs that found the queue full, or were left when the deadline of `close` passed."""
        self.reason = ""
        """Why the last job that failed did."""
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object]) -> None:
        """Queue a job; counts it as dropped when the queue is full."""
        try:
            self._jobs.put_nowait(run)
        except queue.Full:
            self.dropped += 1

    def close(self, deadline_s: float) -> None:
        """Finish what is queued, at most until the deadline, and say what was lost."""
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
                # Whatever it is: a tracking backend's trouble must not become the training's.
                self.failed += 1
                self.reason = f"{type(error).__name__}: {error}"
                if self.failed == 1:
                    logger.warning("%s: %s; later failures are only counted", self.name, self.reason)
