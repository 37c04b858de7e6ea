"""Files and folders made whole: a reader sees the old content or the new one, and a failed write leaves the old one.

The new content is written to a draft in the same folder, `.<name>.<random>.tmp`, and renamed over the file. A process
that is killed meanwhile leaves the draft behind; `remove_drafts` deletes it.
"""

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trackway.system.storage import writing

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
