"""The rollouts of a step."""

import json
from typing import Any

from trackway.console.replies import StepPage
from trackway.console.runs import finite
from trackway.console.trajectory_files import ParquetReader, file_of
from trackway.trainer.run_state.folder import RunFolder
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
