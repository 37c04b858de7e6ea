"""Errors of storage that cannot be written: full, over quota, read-only, or without permission."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trackway.wire.errors import ErrorCode, TrackwayError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE})

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_ROOM = 16 * 1024
"""Bytes for a state file and its replacement. A disk with less free space counts as full."""


class StorageError(TrackwayError, OSError):
    """A file could not be written: DISK_FULL without space, NOT_WRITABLE without permission.

    It is also an OSError, so handlers of failed writes catch it. `detail` has `path`, `disk`
    (the mount point), `free_bytes`, `writing` (what was being written) and `reason` (the name of the errno).
    """


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Turn storage errors of the block into StorageError; other errors pass.

    Rust libraries such as safetensors raise their own exceptions, whose text ends with the number of the OS error.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        number = error_number(error)
        if number not in FULL | NOT_WRITABLE:
            raise
        raise storage_error(number, path, what) from error


def error_number(error: BaseException) -> int | None:
    """The errno of an error, or None."""
    if isinstance(error, OSError):
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def storage_error(number: int, path: Path, what: str, remedy: str | None = None) -> StorageError:
    """The error for `what`, which could not be written to `path`; the default remedy fits any file."""
    disk = _existing(path)
    while not os.path.ismount(disk):
        disk = disk.parent
    code, default = ErrorCode.DISK_FULL, "free space there, or enlarge the disk or its quota"
    if number in NOT_WRITABLE:
        code, default = ErrorCode.NOT_WRITABLE, "make the folder writable for this user, or give another one"
    free = _free_bytes(path)
    error = StorageError(
        code,
        f"expected to write {what} to {path}, got '{os.strerror(number)}' with {free} bytes free on the disk at "
        f"{disk}; {remedy or default}",
        path=str(path),
        disk=str(disk),
        free_bytes=free,
        writing=what,
        reason=errno.errorcode[number],
    )
    error.errno = number
    return error


def storage_problem(folder: Path) -> StorageError | None:
    """The error if a folder is full or read-only, else None. Does not write, so quotas go unnoticed."""
    status = os.statvfs(_existing(folder))
    if status.f_flag & os.ST_RDONLY:
        return storage_error(errno.EROFS, folder, "the run's state")
    if status.f_bavail * status.f_frsize < _ROOM:
        return storage_error(errno.ENOSPC, folder, "the run's state")
    return None


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
