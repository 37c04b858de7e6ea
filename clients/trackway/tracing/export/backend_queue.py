"""One backend's queue and the thread that empties it: straight from memory while the backend keeps up, over the disk
while it does not.

Each backend has its own, so that a slow one does not hold up the others, and no caller ever waits for any of them.
"""

import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from trackway.tracing.export.batch import Batch
from trackway.tracing.export.disk_queue import DiskQueue
from trackway.tracing.export.otlp_http import Answer, Endpoint, Verdict

logger = logging.getLogger("trackway.tracing")

MEMORY_BATCHES = 64
"""Batches (of up to 512 spans) that wait in memory where there is no disk; further ones are dropped."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
LOOK_FOR_ORPHANS_S = 30.0
PATIENCE = 3
"""Answers that say later to one stored batch before the others get their turn."""
DOUBTS = 3
"""Doubtful answers to one batch before it counts as refused; no more than PATIENCE, so that they are of one batch."""


@dataclass(frozen=True)
class BackendStats:
    """What happened to the spans for one backend since the process began; `waiting` is the current number."""

    exported: int = 0
    refused: int = 0
    """The backend rejected them permanently."""
    dropped: int = 0
    """There was no room in memory and on disk, the process ended without a disk, or a file on it was unreadable."""
    waiting: int = 0
    """In memory and on disk."""
    spool_bytes: int = 0


class BackendQueue:
    """Sends batches in the order they came."""

    def __init__(self, name: str, endpoint: Endpoint, spool: DiskQueue | None) -> None:
        self.name = name
        self._endpoint = endpoint
        self._spool = spool
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
        if spool is not None:  # what another process left there goes out without a span of our own
            self._ensure_thread()

    def put(self, batch: Batch) -> None:
        """Queue a batch; never waits."""
        with self._changed:
            self._ensure_thread()
            if self._closing_at is None and not self._down and self._has_room():
                self._memory.append(batch)
            else:
                self._store(batch)
            self._changed.notify_all()

    def stats(self) -> BackendStats:
        """Counts so far."""
        with self._changed:
            dropped = self._dropped + (self._spool.broken_spans if self._spool else 0)
            return BackendStats(self._exported, self._refused, dropped, self._waiting(), self._spool_bytes())

    def wait_empty(self, deadline: float) -> bool:
        """Wait until nothing waits here, at most until `deadline` (time.monotonic)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting(), max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> bool:
        """Send until `deadline` (time.monotonic), then keep the rest on disk; False when something was left."""
        with self._changed:
            self._closing_at = deadline
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        with self._changed:
            left = self._waiting()
            if self._sending is not None:  # nobody will hear how that ends; a second copy does no harm
                self._memory.appendleft(self._sending)
                self._sending = None
            self._spill()
        if self._spool is not None:
            self._spool.close()
        return not left

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"trackway-traces-{self.name}", daemon=True)
            self._thread.start()

    def _waiting(self) -> int:
        on_disk = self._spool.spans if self._spool else 0
        # A batch that is sent from disk is still counted there.
        in_flight = self._sending.spans if self._sending else 0
        return in_flight + sum(batch.spans for batch in self._memory) + on_disk

    def _spool_bytes(self) -> int:
        return self._spool.bytes if self._spool else 0

    def _has_room(self) -> bool:
        """Whether a batch may wait in memory: behind none where there is a disk, as a killed process loses it."""
        if self._spool is None:
            return len(self._memory) < MEMORY_BATCHES
        return not self._memory and self._sending is None

    def _store(self, batch: Batch) -> None:
        """To disk; without one to memory while there is room, as the backend may come back."""
        if self._spool is not None and self._spool.push(batch):
            return
        if self._spool is None and len(self._memory) < MEMORY_BATCHES and self._closing_at is None:
            self._memory.append(batch)
            return
        if self._dropped == 0:
            logger.warning("%s: no room for %d spans; they and later ones are counted", self.name, batch.spans)
        self._dropped += batch.spans

    def _spill(self) -> None:
        if self._spool is None and self._closing_at is None:
            return
        while self._memory:
            self._store(self._memory.popleft())

    def _work(self) -> None:
        pause = 0.0
        while self._wait_for_work(pause):
            answer = self._send_next()
            pause = 0.0 if answer is None else self._next_pause(answer, pause)
        self._endpoint.close()

    def _wait_for_work(self, pause: float) -> bool:
        """Pause, then wait for a batch; False when the work ends."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._closing_at is not None, pause)
            while self._closing_at is None and not self._waiting():
                if not self._changed.wait(LOOK_FOR_ORPHANS_S) and self._spool is not None:
                    self._spool.adopt()
            if self._closing_at is None:
                return True
            # A backend that was away gets one more chance: it may be back since.
            hopeless, self._last_try = self._down and self._last_try, True
            return bool(self._waiting()) and not hopeless and time.monotonic() < self._closing_at

    def _send_next(self) -> Answer | None:
        """Send the oldest batch; what the answer was, None when there was nothing to send."""
        stored = self._spool.oldest() if self._spool else None
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
            if answer.verdict is Verdict.LATER and still_ours:
                self._memory.appendleft(batch)
            self._settle(batch, answer)
        return answer

    def _judged(self, answer: Answer) -> Answer:
        """A doubtful answer means later at first, and never when it stays the same."""
        if answer.verdict is not Verdict.DOUBTFUL:
            self._doubts = 0
            return answer
        self._doubts += 1
        certain = self._doubts >= DOUBTS
        self._doubts = 0 if certain else self._doubts
        return replace(answer, verdict=Verdict.REFUSED if certain else Verdict.LATER)

    def _settle_stored(self, path: Path, batch: Batch, answer: Answer) -> None:
        with self._changed:
            if self._spool is not None:
                self._settle_file(self._spool, path, answer)
            self._settle(batch, answer)

    def _settle_file(self, spool: DiskQueue, path: Path, answer: Answer) -> None:
        if answer.verdict is not Verdict.LATER:
            self._put_off = 0
            spool.remove(path)
        elif answer.answered:
            self._put_off += 1
            if self._put_off >= PATIENCE:
                self._put_off = self._doubts = 0  # both are the next batch's now
                spool.postpone(path)

    def _settle(self, batch: Batch, answer: Answer) -> None:
        if answer.verdict is Verdict.LATER:
            if not self._down:
                logger.warning("traces for %s wait: %s", self.name, answer.reason)
            self._down = True
            self._spill()
        else:
            if self._down:
                logger.warning("traces for %s go on", self.name)
            self._down = False
            refused = batch.spans if answer.verdict is Verdict.REFUSED else answer.refused_spans
            if refused and not self._refused:
                logger.warning("%s refused %d spans: %s; later ones are counted", self.name, refused, answer.reason)
            self._refused += refused
            self._exported += batch.spans - refused
        self._changed.notify_all()

    def _next_pause(self, answer: Answer, last: float) -> float:
        if answer.verdict is not Verdict.LATER:
            return 0.0
        doubled = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, last * 2))
        return max(answer.retry_after_s, doubled * random.uniform(0.75, 1.25))
