"""What a backend does not take now, kept on disk until it does: one file per batch, bounded in bytes.

    <spool_dir>/<backend>/<service>-<pid>-<random>/00000001-512.otlp    the number of spans stands in the name

While a backend is away for long, small batches for the same address become one file, so that hours of them stay few.
A folder that is deleted under the process is made again: what lay in it is lost and counted.

Each process holds a lock on its own folder. A folder without its holder was left by a process that died, and whichever
process looks next adopts its files: a killed replica loses nothing that lay on disk.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from trackway.system import atomic_write, writing
from trackway.tracing.export.batch import MAX_ROOTS, Batch, joined

JOINED_FROM = 64
"""Files; a later batch joins the newest one where it can. Not before: a backend that refuses one batch refuses all of
its file."""

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
        """The file that the next batch may join; none once it was given out to be sent."""
        self.broken_spans = 0
        """Of files that could not be read, which lie aside as `.broken`, or were deleted by another hand."""
        self._folder, self._lock = self._made()
        self.adopt()

    def _made(self) -> tuple[Path, int | None]:
        """A folder of this process's own, and its lock. Raises StorageError, with nothing left of it."""
        name = f"{self._owner}-{os.getpid()}-{os.urandom(3).hex()}"
        # Hidden until it is locked, or another process would take it for one without a holder.
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
        """Bytes that wait here."""
        return self._bytes

    @property
    def spans(self) -> int:
        """Spans that wait here."""
        return self._spans

    def push(self, batch: Batch) -> bool:
        """Keep a batch; False when that would exceed the bound, or the disk is full."""
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
                    replaced.unlink(missing_ok=True)  # after the new one lies there: a second copy does no harm
            self._add(path, len(data))
            self._newest = path, whole
            return True

    def _begin_again(self) -> bool:
        """A new folder in place of one that was deleted; False when none can be made."""
        try:
            folder, lock = self._made()
        except OSError:
            return False
        self.broken_spans += self._spans
        self._sizes.clear()
        self._bytes = self._spans = 0
        self._newest = None
        if self._lock is not None:
            os.close(self._lock)
        self._folder, self._lock = folder, lock
        return True

    def oldest(self) -> tuple[Path, Batch] | None:
        """The batch to send next, which stays until `remove`; a file that is not one of ours is set aside."""
        while True:
            with self._guard:
                path = next(iter(self._sizes), None)
                if self._newest is not None and self._newest[0] == path:
                    self._newest = None  # it is on its way
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
        """The batch was sent, or never will be. A file that a read-only disk keeps is sent again later."""
        with self._guard:
            self._forget(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def postpone(self, path: Path) -> None:
        """Put a batch behind all others: one that a backend cannot digest must not keep the rest from it."""
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
        """Take over what processes left that are gone; how many batches that was."""
        found = 0
        with contextlib.suppress(FileNotFoundError):  # deleted, and made again with the next batch
            for folder in sorted(self._siblings.iterdir()):
                if folder != self._folder and folder.is_dir() and not folder.name.startswith("."):
                    found += self._take_over(folder)
        return found

    def _take_over(self, folder: Path) -> int:
        lock = _locked(folder)
        if lock is None:
            return 0
        found = 0
        with self._guard:
            try:
                for path in sorted(folder.glob("*.otlp")):
                    own = self._name(_spans(path))
                    size = path.stat().st_size
                    path.rename(own)
                    self._add(own, size)
                    self._newest = None
                    found += 1
            except OSError as error:  # a disk that takes nothing: the rest waits for a later look
                logger.warning("traces in %s cannot be taken over: %s", folder, error)
                os.close(lock)
                return found
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
        _remove_empty(folder, lock)
        return found

    def _name(self, spans: int) -> Path:
        """A new file's, behind all others."""
        path = self._folder / f"{self._next:08d}-{spans}.otlp"
        self._next += 1
        return path

    def _add(self, path: Path, size: int) -> None:
        self._sizes[path] = size
        self._bytes += size
        self._spans += _spans(path)

    def _forget(self, path: Path) -> bool:
        """Whether it was still there."""
        size = self._sizes.pop(path, None)
        if size is None:
            return False
        self._bytes -= size
        self._spans -= _spans(path)
        return True

    def close(self) -> None:
        """Let go of the folder; what waits in it is adopted by whoever comes next."""
        if self._lock is None:
            return
        if self._sizes:
            os.close(self._lock)
        else:
            _remove_empty(self._folder, self._lock)
        self._lock = None


def _spans(path: Path) -> int:
    count = path.stem.rpartition("-")[2]
    return int(count) if count.isdecimal() else 0


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None when another process holds it."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_empty(folder: Path, lock: int) -> None:
    with contextlib.suppress(OSError):
        (folder / _LOCK).unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):
        folder.rmdir()
