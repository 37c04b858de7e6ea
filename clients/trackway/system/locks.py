"""File locks between processes, by the kernel's `flock`: released when their holder exits, however it exits.

A lock does not pass to a forked child, and any thread of the holder may release it. On NFS the kernel turns it into a
lock of the server, which keeps a dead machine's lock for about 90 s. A file system without locks is an error: a marker
file in place of a lock would outlive a killed holder.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_POLL_S = 0.01


class LockTaken(BlockingIOError):
    """Another holder, in this process or another, has the lock."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}")
        self.holder = holder
        """Text that the holder wrote into the file. May be empty."""


def acquire_lock(path: Path, *, holder: str = "", wait_s: float = 0.0, mode: int | None = 0o600) -> FileLock:
    """The acquired lock of a file, which is created with its folder if needed and stays after `release`.

    `holder` is written into the file, for `LockTaken.holder`. `mode` is a new file's mode. None leaves it to the
    umask. Raises LockTaken when the lock is not free within `wait_s` seconds, and OSError when the file cannot be
    locked.
    """
    if mode is None:
        lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    else:
        lock = FileLock(path, mode=mode, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
    except Timeout:
        raise LockTaken(path, _text(path)) from None
    if holder:
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its holder's name
            path.write_text(holder)
    return lock


@contextmanager
def locked(path: Path, *, holder: str = "", wait_s: float = 0.0, mode: int | None = 0o600) -> Iterator[None]:
    """Hold a file's lock during the block. Raises as `acquire_lock`."""
    lock = acquire_lock(path, holder=holder, wait_s=wait_s, mode=mode)
    try:
        yield
    finally:
        lock.release()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
