"""The queue of one backend: a thread that sends batches, from disk if there is a disk queue.

A batch is on disk before it is sent and until it is answered, so a killed process loses no batch. Each backend has its
own queue, so a slow backend does not delay others, and no caller waits for one.

The disk queue has the batches that a backend cannot accept now, one file per batch, bounded in bytes.

    <spool_dir>/<backend>/<service>-<pid>-<random>/00000001-512.otlp    the name has the number of spans

During a long outage, small batches for the same address are merged into one file, which keeps the number of files low.
If the folder is deleted, it is created again. The lost spans are counted.

Each process locks its own folder. An unlocked folder belongs to a process that died, and the next process adopts its
files, so a killed replica loses nothing that was on disk.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from trackway.system import acquire_lock, atomic_write, writing
from trackway.system.waits import Backoff
from trackway.tracing.export.otlp import MAX_ROOTS, Answer, Batch, Endpoint, SendOutcome, joined

JOINED_FROM = 64
"""Number of files from which a new batch is merged into the newest file if possible. Not earlier, because a backend
refuses all batches of a file together."""

_LOCK = "lock"

logger = logging.getLogger("trackway.tracing")


class DiskQueue:
    """A queue of batches in a folder of this process; oldest first."""

    def __init__(self, folder: Path, owner: str, max_bytes: int) -> None:
        """Raises OSError when the folder cannot be written."""
        self._siblings = folder
        self._owner = owner
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._next = 1
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """Bytes of each file, oldest first."""
        self.bytes = self.spans = 0
        """Sizes of the batches in the queue."""
        self._newest: tuple[Path, Batch] | None = None
        """The file that the next batch may be merged into. None once it is being sent."""
        self.broken_spans = 0
        """Spans of unreadable files, which are renamed to `.broken`, and of files deleted by others."""
        self._folder, self._lock = self._made()
        self.adopt()

    def _made(self) -> tuple[Path, FileLock | None]:
        """Create and lock a folder for this process. Raises StorageError. The folder is then removed."""
        name = f"{self._owner}-{os.getpid()}-{os.urandom(3).hex()}"
        # Hidden until it is locked, because another process would adopt an unlocked folder.
        hidden = self._siblings / f".{name}"
        with writing(self._siblings, "traces that wait"):
            try:
                hidden.mkdir(parents=True)
                lock = _locked(hidden)
                return hidden.rename(self._siblings / name), lock
            except OSError:
                shutil.rmtree(hidden, ignore_errors=True)
                raise

    def push(self, batch: Batch) -> bool:
        """Store a batch. False when the bound would be exceeded or the disk is full."""
        with self._guard:
            if not self._folder.is_dir() and not self._begin_again():
                return False
            replaced: Path | None = None
            whole, freed = batch, 0
            if self._newest is not None and len(self._sizes) >= JOINED_FROM:
                newest, stored = self._newest
                if stored.headers == batch.headers and stored.spans + batch.spans <= MAX_ROOTS:
                    replaced, whole, freed = newest, joined(stored, batch), self._sizes[newest]
            data = whole.to_bytes()
            if self.bytes - freed + len(data) > self._max_bytes:
                return False
            path = self._name(whole.spans)
            try:
                atomic_write(path, data)
            except OSError:
                return False
            if replaced is not None:
                self._forget(replaced)
                with contextlib.suppress(OSError):
                    replaced.unlink(missing_ok=True)  # after the new file exists: a duplicate is harmless
            self._add(path, len(data))
            self._newest = path, whole
            return True

    def _begin_again(self) -> bool:
        """Replace a deleted folder. False when a new one cannot be created."""
        try:
            folder, lock = self._made()
        except OSError:
            return False
        self.broken_spans += self.spans
        self._sizes.clear()
        self.bytes = self.spans = 0
        self._newest = None
        if self._lock is not None:
            self._lock.release()
        self._folder, self._lock = folder, lock
        return True

    def oldest(self) -> tuple[Path, Batch] | None:
        """The batch to send next, which stays in the queue until `remove`. Unreadable files are set aside."""
        while True:
            with self._guard:
                path = next(iter(self._sizes), None)
                if self._newest is not None and self._newest[0] == path:
                    self._newest = None  # it is being sent
            if path is None:
                return None
            try:
                return path, Batch.from_bytes(path.read_bytes(), _spans(path))
            except (OSError, ValueError):
                with self._guard:
                    if self._forget(path):
                        self.broken_spans += _spans(path)
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(".broken"))

    def remove(self, path: Path) -> None:
        """Remove a batch that was sent or refused. If the disk is read-only, the file is sent again later."""
        with self._guard:
            self._forget(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def postpone(self, path: Path) -> None:
        """Move a batch behind all others, so that a batch the backend cannot process does not block the rest."""
        with self._guard:
            last = self._name(_spans(path))
            size = self._sizes.get(path)
            with contextlib.suppress(OSError):
                path.rename(last)
                if size is not None:
                    self._forget(path)
                    self._add(last, size)
                    self._newest = None

    def adopt(self) -> int:
        """Take over the files of processes that have exited. Returns the number of batches."""
        adopted = 0
        with contextlib.suppress(FileNotFoundError):  # deleted; the next batch creates it again
            for folder in sorted(self._siblings.iterdir()):
                if folder != self._folder and folder.is_dir() and not folder.name.startswith("."):
                    adopted += self._take_over(folder)
        return adopted

    def _take_over(self, folder: Path) -> int:
        lock = _locked(folder)
        if lock is None:
            return 0
        adopted = 0
        with self._guard:
            try:
                for path in sorted(folder.glob("*.otlp")):
                    destination = self._name(_spans(path))
                    size = path.stat().st_size
                    path.rename(destination)
                    self._add(destination, size)
                    self._newest = None
                    adopted += 1
            except OSError as error:  # the disk is not writable; the rest is adopted later
                logger.warning("traces in %s cannot be taken over: %s", folder, error)
                lock.release()
                return adopted
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
        _remove_empty(folder, lock)
        return adopted

    def _name(self, spans: int) -> Path:
        """The path of a new file, which sorts behind all others."""
        path = self._folder / f"{self._next:08d}-{spans}.otlp"
        self._next += 1
        return path

    def _add(self, path: Path, size: int) -> None:
        self._sizes[path] = size
        self.bytes += size
        self.spans += _spans(path)

    def _forget(self, path: Path) -> bool:
        """Remove a file from the counts. False when it was not in the queue."""
        size = self._sizes.pop(path, None)
        if size is None:
            return False
        self.bytes -= size
        self.spans -= _spans(path)
        return True

    def close(self) -> None:
        """Unlock the folder; another process adopts the remaining files."""
        if self._lock is None:
            return
        if self._sizes:
            self._lock.release()
        else:
            _remove_empty(self._folder, self._lock)
        self._lock = None


def _spans(path: Path) -> int:
    count = path.stem.rpartition("-")[2]
    return int(count) if count.isdecimal() else 0


def _locked(folder: Path) -> FileLock | None:
    """The folder's lock, or None when another process holds it."""
    try:
        return acquire_lock(folder / _LOCK)
    except OSError:
        return None


def _remove_empty(folder: Path, lock: FileLock) -> None:
    with contextlib.suppress(OSError):
        (folder / _LOCK).unlink(missing_ok=True)
    lock.release()
    with contextlib.suppress(OSError):
        folder.rmdir()


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
