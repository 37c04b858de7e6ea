"""The rollouts of a step as a page or a file (CSV of numbers, JSONL of trajectories), and evaluations side by side."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trackway.console.replies import EvaluatedTask, EvaluationColumn, EvaluationsPage, StepPage, TaskResult
from trackway.console.runs import Runs, evaluation_of, finite
from trackway.console.trajectory_files import ParquetReader, file_of, token_values_of
from trackway.evaluation.summary import Estimate
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import from_record
from trackway.wire.errors import ErrorCode, TrackwayError
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
    is_scored = any(score is not None for score in columns["score"])
    advantages = {} if is_scored or validation else advantages_of(reader, folder, step)
    places = zip(columns["sample_index"], columns["rollout_n"], strict=True)
    columns["advantage"] = [advantages.get(place) for place in places]
    texts = _prompts(reader, folder, step, validation, set(columns["sample_index"]))
    first = rows[0]["place"] if rows else offset
    return StepPage(step=step, validation=validation, total=total, offset=first, prompts=texts, **columns)


def advantages_of(reader: ParquetReader, folder: RunFolder, step: int) -> dict[tuple[str, int], float | None]:
    """The mean advantage of each rollout's tokens by sample and rollout. Empty without the values of the tokens.

    Raises TrackwayError.
    """
    file = token_values_of(folder, step)
    if file is None:
        return {}
    rows = reader.query(
        "SELECT sample_index, rollout_n, avg(advantage) FILTER (NOT isnan(advantage)) FROM "
        "(SELECT sample_index, rollout_n, unnest(advantages) AS advantage FROM read_parquet($file)) GROUP BY ALL",
        file,
    )
    return {(sample, rollout): None if mean is None else finite(mean) for sample, rollout, mean in rows}


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


def as_csv(reader: ParquetReader, folder: RunFolder, step: int, validation: bool) -> Iterator[str]:
    """A line for each rollout, after the names of the columns. Raises TrackwayError before the first line."""
    offset, total = 0, 1
    while offset < total:
        page = step_page(reader, folder, step, validation, offset, MOST_ROLLOUTS)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if offset == 0:
            writer.writerow(("step", "validation", *COLUMNS))
        columns = [getattr(page, name) for name in COLUMNS]
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


MOST_COLUMNS = 6
_SCORE = (
    "CAST(coalesce(json_extract(reward, '$.components.acc'), json_extract(reward, '$.components.score'), "
    "to_json(score)) AS DOUBLE)"
)
"""SQL of the score that passes or fails, as `trackway.trainer.metrics.accuracy`."""
_ENDED = "FILTER (json_extract(error, '$.code') IS NULL)"


class _Tasks(NamedTuple):
    results: dict[str, TaskResult]
    prompts: dict[str, str]


def evaluations_page(reader: ParquetReader, runs: Runs, key: str, offset: int, limit: int) -> EvaluationsPage:
    """The evaluation of a run beside the newest others of the same files, row by row.

    Raises TrackwayError(NOT_FOUND) for a run that trains.
    """
    own = evaluation_of(runs.find(key))
    if own is None:
        message = f"expected the run of an evaluation, got {key!r}; evaluate it: trackway evaluate {key}"
        raise TrackwayError(ErrorCode.NOT_FOUND, message)
    others = ((other, evaluation_of(folder)) for other, folder in runs.all() if other != key)
    same = [(other, found) for other, found in others if found is not None and found.files == own.files]
    shown = [(key, own), *same[: MOST_COLUMNS - 1]]
    tasks = [_tasks(reader, runs.find(name), found.pass_above) for name, found in shown]
    first = tasks[0]
    order = sorted(first.results, key=lambda sample: (first.results[sample].score or 0.0, len(sample), sample))
    return EvaluationsPage(
        columns=[
            EvaluationColumn(key=name, evaluation=found, difference=_difference(of_run.results, first.results))
            for (name, found), of_run in zip(shown, tasks, strict=True)
        ],
        tasks=[
            EvaluatedTask(
                sample=sample, prompt=first.prompts[sample], results=[of_run.results.get(sample) for of_run in tasks]
            )
            for sample in order[offset : offset + limit]
        ],
        total=len(order),
    )


def _tasks(reader: ParquetReader, folder: RunFolder, pass_above: float) -> _Tasks:
    rows = reader.query(
        f"SELECT CAST(sample_index AS VARCHAR), avg({_SCORE}) {_ENDED}, "
        f"count(*) FILTER (json_extract(error, '$.code') IS NULL AND {_SCORE} > $above), count(*) {_ENDED}, count(*), "
        "any_value(prompt_messages) FROM read_parquet($file) GROUP BY 1",
        file_of(folder, 0, True),
        above=pass_above,
    )
    results = {
        sample: TaskResult(
            score=None if score is None else finite(score), passed=passed, rollouts=ended, failed=count - ended
        )
        for sample, score, passed, ended, count, _ in rows
    }
    return _Tasks(results, {sample: last_user_text(messages)[:PROMPT_CHARS] for sample, *_, messages in rows})


def _difference(mine: Mapping[str, TaskResult], first: Mapping[str, TaskResult]) -> Estimate | None:
    if mine is first:
        return None
    pairs = [(mine[sample].score, first[sample].score) for sample in mine.keys() & first.keys()]
    values = [score - other for score, other in pairs if score is not None and other is not None]
    return Estimate.over(values) if values else None
