"""Reads source files (parquet, JSON lines, JSON list) record by record. Errors name the file and line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from trackway.system import visible
from trackway.wire.errors import ErrorCode, TrackwayError

SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class Record:
    """A record and its location. Lines, parquet rows and list items count from 1."""

    file: Path
    line: int
    data: dict[str, JsonValue]


@dataclass(frozen=True)
class Rejected:
    """A record that cannot become a row, and the reason."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def read_records(path: Path) -> Iterator[Record | Rejected]:
    """The records of a file in order, without blank lines. A `.json` file is JSONL or a list of objects."""
    if not path.is_file():
        raise _not_found(path)
    if path.suffix not in SUFFIXES:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected a file ending in {' or '.join(SUFFIXES)}, got {path}; convert it first",
        )
    if path.suffix == ".parquet":
        return _read_parquet(path)
    return _read_list(path) if _begins_a_list(path) else _read_jsonl(path)


def _not_found(path: Path) -> TrackwayError:
    folder = path if path.is_dir() else path.parent
    files = sorted(file.name for file in folder.glob("*") if file.suffix in SUFFIXES)
    got = "a folder" if path.is_dir() else "none"
    remedy = f"{folder} has {', '.join(files)}" if files else "make one with `trackway data`"
    return TrackwayError(ErrorCode.NOT_FOUND, f"expected a dataset file at {path}, got {got}; {remedy}")


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        file = pq.ParquetFile(path)
        rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
        yield from (Record(path, line, row) for line, row in enumerate(rows, start=1))
    except (pa.ArrowException, OSError) as error:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected a parquet file at {path}, got one that cannot be read ({error}); write or download it again",
        ) from error


def _read_jsonl(path: Path) -> Iterator[Record | Rejected]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(path, number, line)


def _begins_a_list(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".json" and file.read(256).lstrip().startswith(b"[")


def _read_list(path: Path) -> Iterator[Record | Rejected]:
    try:
        items = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST, f"expected JSON in {path}, got a list that does not parse: {error}; correct it"
        ) from error
    yield from (_to_record(path, number, item) for number, item in enumerate(items, start=1))


def _parse_line(path: Path, number: int, line: bytes) -> Record | Rejected:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Rejected(path, number, f"expected a JSON object, got a line that does not parse: {error}")
    return _to_record(path, number, data)


def _to_record(path: Path, number: int, data: JsonValue) -> Record | Rejected:
    if not isinstance(data, dict):
        return Rejected(path, number, f"expected a JSON object, got {type(data).__name__}")
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = visible(error.object[error.start])
        return Rejected(path, number, f"expected text, got a lone surrogate, {surrogate}, which is half a character")
    return Record(path, number, data)
