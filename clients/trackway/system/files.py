"""Files that are replaced whole: a reader sees the old content or the new one, and a failed write leaves the old one.

The new content is written beside the file under a name of its own, `.<name>.<random>.tmp`, and renamed over it. A
process that is killed meanwhile leaves that draft behind: `remove_drafts`.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trackway.system.storage import writing

_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
ABANDONED_S = 3600.0
"""Age of a draft that no process completes any more; a draft is a single file, which takes seconds to write."""


@contextmanager
def replacing(path: Path, what: str | None = None) -> Iterator[Path]:
    """`with replacing(path) as draft:` the file that the block writes to `draft` takes the place of `path`.

    When the block raises, the draft is removed and `path` stays as it was. `what` is what the file holds, for people;
    its name by default. Raises StorageError when the disk is full or cannot be written.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    with writing(path, what or path.name):
        try:
            yield draft
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def atomic_write(path: Path, content: str | bytes, *, what: str | None = None, mode: int = 0o666) -> None:
    """Replace a file with this content; `mode` is that of a new file, less the umask. Raises StorageError."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, what) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)


def remove_drafts(folder: Path, older_than_s: float = ABANDONED_S) -> int:
    """How many drafts of killed processes were removed from a folder and all folders in it; never raises OSError."""
    removed = 0
    for draft in folder.rglob(".*.tmp"):
        with contextlib.suppress(OSError):
            if _DRAFT.fullmatch(draft.name) and time.time() - draft.lstat().st_mtime > older_than_s:
                draft.unlink()
                removed += 1
    return removed


def append_line(path: Path, line: str, *, what: str | None = None) -> None:
    """Add a line to a file, all of it or nothing. Raises StorageError."""
    with writing(path, what or path.name), path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            os.ftruncate(file.fileno(), size)
            raise
