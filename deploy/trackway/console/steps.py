"""The rollouts of a step: a page, or a file (CSV of their numbers, JSONL of whole trajectories)."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from trackway.console.replies import StepPage
from trackway.console.runs import finite
from trackway.console.trajectory_files import ParquetReader, file_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import from_record
from trackway.wire.trajectory import ACTIVITIES

MOST_ROLLOUTS = 8192
"""Rollouts of one reply, whose last group is whole."""
PROMPT_CHARS = 160

COLUMNS = {
    "sample_index": "CAST(sample_index AS VARCHAR)",
    "rollout_n": "rollout_n",
    "score": "score",
    "stop_reason": "stop_reason",
    "error": "json_extract_string(error, '$.code')",
    "num_turns": "num_turns",
    "tokens": "len(response_ids)",
    "seconds": "CAST(json_extract(timings, '$.total') AS DOUBLE)",
    "incidents": "len(incidents)",
    "traced": "trace_id IS NOT NULL",
    "is_baseline": "is_baseline",
}
"""SQL of each column of a step's page."""
_PARTS = {title: f"CAST(json_extract(timings, '$.{name}') AS DOUBLE)" for name, title in ACTIVITIES.items()}
"""SQL of the seconds of each activity."""
_INDEX = "CAST(sample_index AS VARCHAR)"
ORDER = f"TRY_CAST({_INDEX} AS BIGINT) NULLS LAST, {_INDEX}, rollout_n"
"""SQL of the order of prompts and rollouts: indices that are numbers by value, others by text."""
_GROUP = "OVER (PARTITION BY sample_index)"
_FIRST = f"CASE WHEN count(*) {_GROUP} > $limit THEN place ELSE min(place) {_GROUP} END"
"""SQL of the place of the first rollout of a row's group, or of the row itself if the group is too long."""


def step_page(
    reader: ParquetReader, folder: RunFolder, step: int, validation: bool, offset: int, limit: int
) -> StepPage:
    """The groups whose first rollout is one of `limit` after `offset`, in the order of prompts and rollouts.

    A group of more than `limit` is cut. Raises TrackwayError.
    """
    file = file_of(folder, step, validation)
    selected = ", ".join(f'{sql} AS "{name}"' for name, sql in {**COLUMNS, **_PARTS}.items())
    rows = reader.records(
        f"SELECT {selected}, place FROM (SELECT *, {_FIRST} AS first FROM (SELECT *, "
        f"row_number() OVER (ORDER BY {ORDER}) - 1 AS place FROM read_parquet($file))) "
        "WHERE first >= $offset AND first < $offset + $limit ORDER BY place",
        file,
        limit=limit,
        offset=offset,
    )
    [(total,)] = reader.query("SELECT count(*) FROM read_parquet($file)", file)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in COLUMNS}
    columns["parts"] = {title: [row[title] for row in rows] for title in _PARTS}
    columns["score"] = [None if score is None else finite(score) for score in columns["score"]]
    texts = _prompts(reader, folder, step, validation, set(columns["sample_index"]))
    first = rows[0]["place"] if rows else offset
    return StepPage(step=step, validation=validation, total=total, offset=first, prompts=texts, **columns)


def _prompts(
    reader: ParquetReader, folder: RunFolder, step: int, validation: bool, samples: set[str]
) -> dict[str, str]:
    rows = reader.query(
        "SELECT CAST(sample_index AS VARCHAR), any_value(prompt_messages) FROM read_parquet($file) GROUP BY 1",
        file_of(folder, step, validation),
    )
    return {sample: last_user_text(messages)[:PROMPT_CHARS] for sample, messages in rows if sample in samples}


def last_user_text(messages: str) -> str:
    """The content of the last user message of a conversation in JSON. Empty without one."""
    try:
        contents = [message["content"] for message in json.loads(messages) if message["role"] == "user"]
    except (ValueError, TypeError, KeyError):
        return ""
    return str(contents[-1]) if contents else ""


_MOST_ROWS, _MOST_BYTES = 128, 16_000_000
"""Trajectories in memory at once, and their bytes in the file."""
_COLUMNS = (
    "sample_index",
    "rollout_n",
    "score",
    "stop_reason",
    "error",
    "num_turns",
    "tokens",
    "seconds",
    "incidents",
    "traced",
    "is_baseline",
)


def as_csv(reader: ParquetReader, folder: RunFolder, step: int, validation: bool) -> Iterator[str]:
    """A line for each rollout, after the names of the columns. Raises TrackwayError before the first line."""
    offset, total = 0, 1
    while offset < total:
        page = step_page(reader, folder, step, validation, offset, MOST_ROLLOUTS)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if offset == 0:
            writer.writerow(("step", "validation", *_COLUMNS))
        columns = [getattr(page, name) for name in _COLUMNS]
        writer.writerows((step, validation, *row) for row in zip(*columns, strict=True))
        yield text.getvalue()
        offset, total = offset + MOST_ROLLOUTS, page.total


def as_jsonl(
    reader: ParquetReader,
    folder: RunFolder,
    step: int,
    validation: bool,
    sample: str | None = None,
    rollout: int | None = None,
) -> Iterator[str]:
    """A trajectory per line, with its tokens, as the agent returned it: all, or one sample's or number's.

    Raises TrackwayError before the first line.
    """
    file, start = file_of(folder, step, validation), 0
    part, count = reader.rows_within(file, _MOST_BYTES)
    part = min(part, _MOST_ROWS)
    while start < count:
        records = reader.records(
            "SELECT * EXCLUDE (file_row_number) FROM read_parquet($file, file_row_number = true) "
            "WHERE file_row_number >= $start AND file_row_number < $end "
            "AND ($sample IS NULL OR CAST(sample_index AS VARCHAR) = $sample) "
            "AND ($rollout IS NULL OR rollout_n = $rollout) ORDER BY file_row_number",
            file,
            start=start,
            end=start + part,
            sample=sample,
            rollout=rollout,
        )
        start += part
        for record in records:
            kept = {name: value for name, value in record.items() if value is not None}
            yield from_record(kept).model_dump_json() + "\n"
