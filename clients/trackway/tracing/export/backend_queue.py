"""The queue of one backend and the thread that sends from it, from disk if there is a disk queue.

A batch is on disk before it is sent and until it is answered, so a killed process loses no batch. Each backend has its
own queue, so a slow backend does not delay others, and no caller waits for one.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from trackway.system.waits import Backoff
from trackway.tracing.export.batch import Batch
from trackway.tracing.export.disk_queue import DiskQueue
from trackway.tracing.export.otlp_http import Answer, Endpoint, SendOutcome

logger = logging.getLogger("trackway.tracing")

MEMORY_BATCHES = 64
"""Batches (of up to 512 spans) that wait in memory without a disk queue. Further ones are dropped."""
BACKOFF = Backoff(first_s=0.5, longest_s=15.0)
LOOK_FOR_ORPHANS_S = 30.0
POSTPONE_AFTER = 3
"""Retryable answers to one stored batch before it moves behind the others."""
REFUSED_AFTER = 3
"""Doubtful answers to one batch before it counts as refused. At most POSTPONE_AFTER, so that all are for one batch."""


@dataclass(frozen=True)
class BackendStats:
    """Counts of spans for one backend since the process started. `waiting` is the current number."""

    exported: int = 0
    refused: int = 0
    """The backend rejected them permanently."""
    dropped: int = 0
    """Memory and disk were full, the process ended without a disk queue, or a file on disk was unreadable."""
    waiting: int = 0
    """In memory and on disk."""
    spool_bytes: int = 0


class BackendQueue:
    """Sends batches in the order they came."""

    def __init__(self, name: str, endpoint: Endpoint, disk_queue: DiskQueue | None) -> None:
        self.name = name
        self._endpoint = endpoint
        self._disk_queue = disk_queue
        self._memory: deque[Batch] = deque()
        self._sending: Batch | None = None
        self._exported = self._refused = self._dropped = 0
        self._down = False
        self._closing_at: float | None = None
        self._last_try = False
        self._doubts = 0
        self._put_off = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if disk_queue is not None:  # sends files left by another process even without new spans
            self._ensure_thread()

    def put(self, batch: Batch) -> None:
        """Queue a batch without blocking."""
        with self._changed:
            self._ensure_thread()
            self._store(batch)
            self._changed.notify_all()

    def stats(self) -> BackendStats:
        """Counts so far."""
        with self._changed:
            dropped = self._dropped + (self._disk_queue.broken_spans if self._disk_queue else 0)
            return BackendStats(self._exported, self._refused, dropped, self._waiting(), self._disk_bytes())

    def wait_empty(self, deadline: float) -> bool:
        """Wait until the queue is empty, at most until `deadline` (time.monotonic). False if it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting(), max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> bool:
        """Send until `deadline` (time.monotonic), then move the rest to disk. False if something was left."""
        with self._changed:
            self._closing_at = deadline
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        with self._changed:
            left = self._waiting()
            if self._sending is not None:  # its answer will not be seen; a duplicate is harmless
                self._memory.appendleft(self._sending)
                self._sending = None
            self._spill()
        if self._disk_queue is not None:
            self._disk_queue.close()
        return not left

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"trackway-traces-{self.name}", daemon=True)
            self._thread.start()

    def _waiting(self) -> int:
        on_disk = self._disk_queue.spans if self._disk_queue else 0
        # A batch being sent from disk still counts as on disk.
        in_flight = self._sending.spans if self._sending else 0
        return in_flight + sum(batch.spans for batch in self._memory) + on_disk

    def _disk_bytes(self) -> int:
        return self._disk_queue.bytes if self._disk_queue else 0

    def _has_room(self) -> bool:
        """Return whether a batch may wait in memory. With a full disk only one may, while the backend keeps up."""
        if self._closing_at is not None:
            return False
        if self._disk_queue is None:
            return len(self._memory) < MEMORY_BATCHES
        return not self._down and not self._memory and self._sending is None

    def _store(self, batch: Batch) -> None:
        """Store a batch on disk, or in memory where there is no disk queue or no room on disk; else drop it."""
        if self._disk_queue is not None and self._disk_queue.push(batch):
            return
        if self._has_room():
            self._memory.append(batch)
            return
        if self._dropped == 0:
            logger.warning("%s: queue full, dropped %d spans; later drops are only counted", self.name, batch.spans)
        self._dropped += batch.spans

    def _spill(self) -> None:
        if self._disk_queue is None and self._closing_at is None:
            return
        while self._memory:
            self._store(self._memory.popleft())

    def _work(self) -> None:
        pause, failures = 0.0, 0
        while self._wait_for_work(pause):
            answer = self._send_next()
            if answer is not None and answer.verdict is SendOutcome.LATER:
                failures += 1
                pause = max(answer.retry_after_s, BACKOFF.pause_s(failures))
            else:
                pause, failures = 0.0, 0
        self._endpoint.close()

    def _wait_for_work(self, pause: float) -> bool:
        """Pause, then wait for a batch. False when the thread should exit."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._closing_at is not None, pause)
            while self._closing_at is None and not self._waiting():
                if not self._changed.wait(LOOK_FOR_ORPHANS_S) and self._disk_queue is not None:
                    self._disk_queue.adopt()
            if self._closing_at is None:
                return True
            # A backend that was down gets one more attempt.
            hopeless, self._last_try = self._down and self._last_try, True
            return bool(self._waiting()) and not hopeless and time.monotonic() < self._closing_at

    def _send_next(self) -> Answer | None:
        """Send the oldest batch. Returns the answer. None when there is nothing to send."""
        stored = self._disk_queue.oldest() if self._disk_queue else None
        if stored is not None:
            answer = self._judged(self._endpoint.post(stored[1]))
            self._settle_stored(*stored, answer)
            return answer
        with self._changed:
            if not self._memory:
                return None
            batch = self._memory.popleft()
            self._sending = batch
        answer = self._judged(self._endpoint.post(batch))
        with self._changed:
            still_ours, self._sending = self._sending is batch, None
            if answer.verdict is SendOutcome.LATER and still_ours:
                self._memory.appendleft(batch)
            self._settle(batch, answer)
        return answer

    def _judged(self, answer: Answer) -> Answer:
        """The answer with DOUBTFUL resolved: LATER at first, REFUSED after `REFUSED_AFTER` in a row."""
        if answer.verdict is not SendOutcome.DOUBTFUL:
            self._doubts = 0
            return answer
        self._doubts += 1
        certain = self._doubts >= REFUSED_AFTER
        self._doubts = 0 if certain else self._doubts
        return replace(answer, verdict=SendOutcome.REFUSED if certain else SendOutcome.LATER)

    def _settle_stored(self, path: Path, batch: Batch, answer: Answer) -> None:
        with self._changed:
            if self._disk_queue is not None:
                self._settle_file(self._disk_queue, path, answer)
            self._settle(batch, answer)

    def _settle_file(self, disk_queue: DiskQueue, path: Path, answer: Answer) -> None:
        if answer.verdict is not SendOutcome.LATER:
            self._put_off = 0
            disk_queue.remove(path)
        elif answer.answered:
            self._put_off += 1
            if self._put_off >= POSTPONE_AFTER:
                self._put_off = self._doubts = 0  # the next batch starts at zero
                disk_queue.postpone(path)

    def _settle(self, batch: Batch, answer: Answer) -> None:
        if answer.verdict is SendOutcome.LATER:
            if not self._down:
                logger.warning("traces for %s are delayed: %s", self.name, answer.reason)
            self._down = True
            self._spill()
        else:
            if self._down:
                logger.warning("traces for %s are being sent again", self.name)
            self._down = False
            refused = batch.spans if answer.verdict is SendOutcome.REFUSED else answer.refused_spans
            if refused and not self._refused:
                logger.warning(
                    "%s refused %d spans: %s; later refusals are only counted", self.name, refused, answer.reason
                )
            self._refused += refused
            self._exported += batch.spans - refused
        self._changed.notify_all()
