"""The disk queue: batches that a backend cannot accept now, one file per batch, bounded in bytes.

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
from collections import OrderedDict
from pathlib import Path

from filelock import FileLock

from trackway.system import acquire_lock, atomic_write, writing
from trackway.tracing.export.batch import MAX_ROOTS, Batch, joined

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
        self._bytes = self._spans = 0
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

    @property
    def bytes(self) -> int:
        """Bytes in the queue."""
        return self._bytes

    @property
    def spans(self) -> int:
        """Spans in the queue."""
        return self._spans

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
            if self._bytes - freed + len(data) > self._max_bytes:
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
        self.broken_spans += self._spans
        self._sizes.clear()
        self._bytes = self._spans = 0
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
        self._bytes += size
        self._spans += _spans(path)

    def _forget(self, path: Path) -> bool:
        """Remove a file from the counts. False when it was not in the queue."""
        size = self._sizes.pop(path, None)
        if size is None:
            return False
        self._bytes -= size
        self._spans -= _spans(path)
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
