"""Evaluations of the same rows, side by side."""

from collections.abc import Mapping
from typing import NamedTuple

from trackway.console.replies import EvaluatedTask, EvaluationColumn, EvaluationsPage, TaskResult
from trackway.console.runs import Runs, evaluation_of, finite
from trackway.console.steps import PROMPT_CHARS, last_user_text
from trackway.console.trajectory_files import ParquetReader, file_of
from trackway.evaluation.summary import Estimate
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError

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
