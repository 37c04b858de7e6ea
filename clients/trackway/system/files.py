"""Files and folders made whole, file locks between processes, and digests of files.

A reader sees the old content or the new one, and a failed write leaves the old one. The new content is written to a
draft in the same folder, `.<name>.<random>.tmp`, and renamed over the file. A process that is killed meanwhile leaves
the draft behind; `remove_drafts` deletes it.

Locks are the kernel's `flock`, which is released when its holder exits, however it exits. A lock does not pass to a
forked child, and any thread of the holder may release it. On NFS the kernel turns it into a lock of the server, which
keeps a dead machine's lock for about 90 s. A file system without locks is an error: a marker file in place of a lock
would outlive a killed holder.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from trackway.wire.base import RelativePath
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import FileDigest

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
    free = shutil.disk_usage(_existing(path)).free
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


def _existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
ABANDONED_S = 3600.0
"""Age in seconds after which a draft counts as abandoned. Writing one file takes seconds."""


@contextmanager
def replacing(path: Path, what: str | None = None) -> Iterator[Path]:
    """Replace `path` with the file that the block writes: `with replacing(path) as draft:`.

    If the block raises, the draft is removed and `path` stays unchanged. `what` describes the file in messages. Its
    name by default. Raises StorageError if the disk is full or not writable.
    """
    draft = _draft(path)
    with writing(path, what or path.name):
        try:
            yield draft
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def atomic_write(path: Path, content: str | bytes, *, what: str | None = None, mode: int = 0o666) -> None:
    """Replace a file with this content. `mode` is a new file's mode, less the umask. Raises StorageError."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, what) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """`with new_folder(path) as draft:` the folder that the block fills gets the name `path`.

    A folder that has the name by then stays, and the draft is removed, as it is when the block raises. Raises OSError.
    """
    draft = _draft(path)
    try:
        draft.mkdir(parents=True)
        yield draft
        try:
            draft.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def folder_time(folder: Path) -> float:
    """Seconds since 1970 by the clock that dates the folder's files, which may be a file server's. Raises OSError."""
    draft = _draft(folder / "time")
    try:
        draft.touch()
        return draft.stat().st_mtime
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(folder: Path, older_than_s: float = ABANDONED_S) -> int:
    """Delete the drafts of killed processes below a folder and return their number. Never raises OSError."""
    removed = 0
    try:
        now = folder_time(folder)
    except OSError:  # there is no folder, or nothing can be deleted from it
        return 0
    for draft in folder.rglob(".*.tmp"):
        with contextlib.suppress(OSError):
            if _DRAFT.fullmatch(draft.name) and now - draft.lstat().st_mtime > older_than_s:
                draft.unlink()
                removed += 1
    return removed


def append_line(path: Path, line: str, *, what: str | None = None) -> None:
    """Append a line to a file, completely or not at all. Raises StorageError."""
    with writing(path, what or path.name), path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            os.ftruncate(file.fileno(), size)
            raise


def log_tail(log: Path, lines: int = 15, max_bytes: int = 8192) -> str:
    """The last lines of a log, at most `max_bytes` of it. `(no log)` when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.strip().splitlines()[-lines:])


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


class Difference(NamedTuple):
    """A file that differs from its recorded digest."""

    file: str
    expected: str
    """The recorded sha256."""
    got: str
    """The actual sha256, `no file`, or `a link`, which the folder's writer never makes."""


def digests(folder: Path, files: Iterable[Path]) -> list[FileDigest]:
    """Path relative to `folder`, size and sha256 of each file, by path."""
    return [
        FileDigest(name=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=_sha256(path))
        for path in sorted(files)
    ]


def find_difference(folder: Path, files: Iterable[FileDigest]) -> Difference | None:
    """The first file that is missing or has another digest, or None if all match."""
    for file in files:
        path = folder / file.name
        got = "no file"
        if path.is_file():
            got = _sha256(path) if path.resolve() == folder.resolve() / file.name else "a link"
        if got != file.sha256:
            return Difference(file.name, file.sha256, got)
    return None


class _Index(BaseModel):
    weight_map: dict[str, RelativePath]


def indexed_files(folder: Path, pattern: str = "*.index.json") -> list[Path]:
    """The files that the indices of a model's folder name. Raises ValueError for one outside the folder.

    A file may be a link, as all are in the cache of the Hugging Face Hub.
    """
    names: set[str] = set()
    for index in folder.glob(pattern):
        try:
            names.update(_Index.model_validate_json(index.read_bytes()).weight_map.values())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            got = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise ValueError(f"expected {index} to name files of its folder, got {got}; take another model") from error
    return [folder / name for name in sorted(names)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
