"""Digests of files, to detect later changes."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trackway.wire.weights import FileDigest


class Difference(NamedTuple):
    """A file that differs from its recorded digest."""

    file: str
    expected: str
    """The recorded sha256."""
    got: str
    """The actual sha256, or `no file`."""


def digests(folder: Path, files: Iterable[Path]) -> list[FileDigest]:
    """Path relative to `folder`, size and sha256 of each file, by path."""
    return [
        FileDigest(name=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=_sha256(path))
        for path in sorted(files)
    ]


def find_difference(folder: Path, files: Iterable[FileDigest]) -> Difference | None:
    """The first file that is missing or has another digest; None if all match."""
    for file in files:
        path = folder / file.name
        got = _sha256(path) if path.is_file() else "no file"
        if got != file.sha256:
            return Difference(file.name, file.sha256, got)
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
