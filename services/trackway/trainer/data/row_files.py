"""Source files (parquet, JSON lines, JSON list) read record by record, and rows as parquet files in verl's schema.

Errors name the file and line.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue, ValidationError

from trackway.system import replacing, visible, writing
from trackway.trainer.data.rows import from_record, to_record
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError

T = TypeVar("T")

EVERY_S = 5.0
"""Interval between two lines; a shorter operation logs none."""

logger = logging.getLogger("trackway.trainer")


def counted(items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
    """The items unchanged. Their count so far is logged every EVERY_S seconds."""
    last_logged, of_total = time.monotonic(), "" if total is None else f" of {total}"
    for count, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last_logged > EVERY_S:
            last_logged = time.monotonic()
            logger.info("%s: %d%s", doing, count, of_total)


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


Row = TypeVar("Row")

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
OTHER_MEDIA = ("images", "videos", "audios")
RAW_GSM8K = {"question", "answer"}
SHAPES = {
    "data_source": "data_source as the name of a scorer",
    "prompt": 'prompt as [{"role": "user", "content": "..."}]',
    "reward_model": 'reward_model as {"style": "rule", "ground_truth": "<text>"}',
    "extra_info": 'extra_info as {"index": <number or text>, "tools_kwargs": {"<tool>": {"create_kwargs": {...}}}}',
}
"""The correct form of columns that files often get wrong."""


def write_rows(path: Path, rows: list[Sample]) -> None:
    """Replace the file at `path` with these rows, atomically.

    Raises StorageError when it cannot be written, INVALID_REQUEST without rows.
    """
    path = path.expanduser()
    if not rows:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"expected at least one row for {path}, got none; add rows")
    table = _to_table([to_record(row) for row in rows])
    what = f"{len(rows)} rows"
    with writing(path, what):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, what) as draft:
        pq.write_table(table, draft)


def read_rows(path: Path, columns: Mapping[str, str] | None = None) -> list[Sample]:
    """Return the rows of a parquet or JSONL file in verl's schema. One error reports all invalid records.

    `columns` names the file's column for a column of the schema, `{"prompt": "question"}`.
    """
    return read_each(path, lambda record: _to_row(record, columns or {}))


def read_each(path: Path, parse: Callable[[Record], Row]) -> list[Row]:
    """Return what `parse` makes of each record of a file.

    Raises TrackwayError for a missing or empty file. One error reports all records that `parse` refuses.
    """
    path = path.expanduser()
    rows: list[Row] = []
    first_errors: dict[str, TrackwayError] = {}
    invalid = 0
    for record in counted(read_records(path), f"{path}: rows read"):
        try:
            if isinstance(record, Rejected):
                raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{record}; correct the line or remove it")
            rows.append(parse(record))
        except TrackwayError as error:
            invalid += 1
            _, _, reason = error.message.partition(": ")
            if len(first_errors) < _ERRORS_SHOWN:
                first_errors.setdefault(reason, error)
    if invalid:
        raise _combined([*first_errors.values()], invalid, len(rows) + invalid)
    if not rows:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"expected rows in {path}, got none; write the file again")
    return rows


_ERRORS_SHOWN = 3
"""Most reasons that are reported, each at its first record. The other records are counted."""


def _combined(first_errors: Sequence[TrackwayError], invalid: int, records: int) -> TrackwayError:
    if invalid == 1:
        return first_errors[0]
    reasons = "; ".join(error.message for error in first_errors)
    more = f"; and {invalid - len(first_errors)} more" if invalid > len(first_errors) else ""
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{invalid} of {records} records are not rows: {reasons}{more}")


def _to_table(records: list[dict[str, JsonValue]]) -> pa.Table:
    # Not Table.from_pylist, which keeps only the columns of the first row.
    names = list(dict.fromkeys(name for record in records for name in record))
    return pa.table({name: _to_column(name, [record.get(name) for record in records]) for name in names})


def _to_column(name: str, values: list[JsonValue]) -> pa.Array:
    try:
        return pa.array(values)
    except pa.ArrowException as error:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected one type for each key of column {name}, got several ({error}); make them all strings",
        ) from error


def _to_row(record: Record, columns: Mapping[str, str]) -> Sample:
    absent = [column for column in columns.values() if column not in record.data]
    if absent:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"{record.file}:{record.line}: expected the column {', '.join(absent)} (data.prompt_key, "
            f"data.reward_fn_key), got {', '.join(record.data)}; name one of them",
        )
    record = replace(record, data=record.data | {name: record.data[column] for name, column in columns.items()})
    _require_columns(record)
    try:
        row = from_record(record.data)
    except ValidationError as error:
        problem = error.errors()[0]
        told = problem["type"] == "missing" or ", got " in problem["msg"]
        got = "" if told else f", got {type(problem['input']).__name__}"
        raise _invalid(record, ".".join(map(str, problem["loc"])), problem["msg"] + got) from error
    except (TypeError, ValueError) as error:
        raise _invalid(record, "extra_info.index", str(error)) from error
    return row


def _invalid(record: Record, key: str, reason: str) -> TrackwayError:
    shape = SHAPES.get(key.partition(".")[0], "it correctly")
    return TrackwayError(
        ErrorCode.INVALID_REQUEST,
        f"{record.file}:{record.line}: expected verl's row schema, got {key}: {reason}; write {shape}",
    )


def _require_columns(record: Record) -> None:
    media = [name for name in OTHER_MEDIA if record.data.get(name)]
    if media:
        message = f"{record.file}:{record.line}: expected rows of text, got {', '.join(media)}; take rows without them"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    missing = [name for name in REQUIRED_COLUMNS if record.data.get(name) is None]
    if not missing:
        return
    is_raw_gsm8k = record.data.keys() >= RAW_GSM8K
    remedy = f"write {', '.join(SHAPES[name] for name in missing)}"
    if is_raw_gsm8k:
        remedy = "build the file with `trackway data gsm8k --local-dataset-path <its folder>`"
    raise TrackwayError(
        ErrorCode.INVALID_REQUEST,
        f"{record.file}:{record.line}: expected columns {', '.join(REQUIRED_COLUMNS)}, "
        f"missing {', '.join(_with_nearest(name, record.data) for name in missing)} of {', '.join(record.data)}; "
        f"{remedy}",
    )


def _with_nearest(name: str, columns: Collection[str]) -> str:
    others = [column for column in columns if column not in REQUIRED_COLUMNS]
    near = get_close_matches(name, others, n=1)
    return f"{name} (is it {near[0]}? rename it)" if near else name
