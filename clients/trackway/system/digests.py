"""Digests of files, to detect later changes. The files that a model's index names."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from trackway.wire.base import RelativePath
from trackway.wire.weights import FileDigest


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
