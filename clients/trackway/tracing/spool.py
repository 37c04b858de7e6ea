"""What a backend does not take now, kept on disk until it does: one file per batch, bounded in bytes.

    <spool_dir>/<backend>/<service>-<pid>-<random>/00000001-512.otlp    the number of spans stands in the name

Each process holds a lock on its own folder. A folder without its holder was left by a process that died, and whichever
process looks next adopts its files: a killed replica loses nothing that lay on disk.
"""

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from trackway.tracing.batch import Batch

_LOCK = "lock"


class Spool:
    """A queue of batches in a folder of this process; oldest first."""

    def __init__(self, folder: Path, owner: str, max_bytes: int) -> None:
        """Raises OSError when the folder cannot be written."""
        self._siblings = folder
        name = f"{owner}-{os.getpid()}-{os.urandom(3).hex()}"
        self._folder = folder / name
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._next = 1
        self._sizes: dict[Path, int] = {}
        self.broken_spans = 0
        """Of files that could not be read, which lie aside as `.broken`."""
        # Hidden until it is locked, or another process would take it for one without a holder.
        hidden = folder / f".{name}"
        hidden.mkdir(parents=True)
        self._lock = _locked(hidden)
        hidden.rename(self._folder)
        self.adopt()

    @property
    def bytes(self) -> int:
        """Bytes that wait here."""
        with self._guard:
            return sum(self._sizes.values())

    @property
    def spans(self) -> int:
        """Spans that wait here."""
        with self._guard:
            return sum(map(_spans, self._sizes))

    def push(self, batch: Batch) -> bool:
        """Keep a batch; False when that would exceed the bound, or the disk is full."""
        data = batch.to_bytes()
        with self._guard:
            if sum(self._sizes.values()) + len(data) > self._max_bytes:
                return False
            path = self._folder / f"{self._next:08d}-{batch.spans}.otlp"
            partial = path.with_suffix(".partial")
            try:
                partial.write_bytes(data)
                partial.rename(path)
            except OSError:
                partial.unlink(missing_ok=True)
                return False
            self._next += 1
            self._sizes[path] = len(data)
            return True

    def oldest(self) -> tuple[Path, Batch] | None:
        """The batch to send next, which stays until `remove`; a file that is not one of ours is set aside."""
        while True:
            with self._guard:
                path = min(self._sizes, default=None)
            if path is None:
                return None
            try:
                return path, Batch.from_bytes(path.read_bytes(), _spans(path))
            except (OSError, ValueError):
                with self._guard:
                    del self._sizes[path]
                    self.broken_spans += _spans(path)
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(".broken"))

    def remove(self, path: Path) -> None:
        """The batch was sent, or never will be."""
        with self._guard:
            self._sizes.pop(path, None)
        path.unlink(missing_ok=True)

    def postpone(self, path: Path) -> None:
        """Put a batch behind all others: one that a backend cannot digest must not keep the rest from it."""
        with self._guard:
            last = self._folder / f"{self._next:08d}-{_spans(path)}.otlp"
            with contextlib.suppress(OSError):
                path.rename(last)
                self._next += 1
                self._sizes[last] = self._sizes.pop(path)

    def adopt(self) -> int:
        """Take over what processes left that are gone; how many batches that was."""
        found = 0
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
            for path in sorted(folder.glob("*.otlp")):
                own = self._folder / f"{self._next:08d}-{_spans(path)}.otlp"
                self._next += 1
                path.rename(own)
                self._sizes[own] = own.stat().st_size
                found += 1
        _remove_empty(folder, lock)
        return found

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
    (folder / _LOCK).unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):
        folder.rmdir()
