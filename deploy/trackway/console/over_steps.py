"""Queries over all steps of a run: one prompt, and failures by their cause."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from trackway.console.failure_kinds import CALLED, FAILURES, is_infrastructure, pattern_of, service_of
from trackway.console.file_results import FileResults, Row
from trackway.console.replies import Failure, FailuresPage, PromptPage, PromptRollout, Series, TrajectoryAddress
from trackway.console.runs import finite
from trackway.console.steps import last_user_text
from trackway.console.trajectory_files import File, ParquetReader, trajectory_files
from trackway.trainer.run_state.folder import RunFolder

MOST_ROLLOUTS = 2000
"""Rollouts of one prompt in a reply."""
MOST_GROUPS = 200
"""Groups of failures in a reply."""
_ANSWER_CHARS = 200
_FROM = "FROM read_parquet($files, union_by_name = true, filename = true)"
"""The rows of the files, whose indices of samples may be numbers in one and text in another."""


def prompt_page(
    reader: ParquetReader, results: FileResults, folder: RunFolder, sample: str, validation: bool
) -> PromptPage:
    """The rollouts of a sample in all steps, as far as they were read. Validation has samples of its own."""

    def read(some: Sequence[File]) -> tuple[list[tuple[File, Row]], dict[File, str]]:
        rows, unreadable = reader.across(
            "SELECT filename, rollout_n, score, is_baseline, stop_reason, "
            "json_extract_string(error, '$.code'), CAST(json_extract(timings, '$.total') AS DOUBLE), turns "
            f"{_FROM} WHERE CAST(sample_index AS VARCHAR) = $sample ORDER BY rollout_n",
            some,
            sample=sample,
        )
        return [(file, (*numbers, _answer(turns))) for file, (*numbers, turns) in rows], unreadable

    files = [file for file in trajectory_files(folder) if file.validation == validation]
    found = results.of(("prompt", folder.path, sample, validation), files, read, enough=MOST_ROLLOUTS)
    return PromptPage(
        sample=sample,
        validation=validation,
        prompt=_prompt(reader, found.rows[-1][0], sample) if found.rows else "",
        rollouts=[
            PromptRollout(
                step=file.step,
                rollout=rollout,
                score=None if score is None else finite(score),
                is_baseline=is_baseline,
                stop_reason=stop_reason,
                error=error,
                seconds=seconds,
                answer=answer,
            )
            for file, (rollout, score, is_baseline, stop_reason, error, seconds, answer) in found.rows[-MOST_ROLLOUTS:]
        ],
        truncated=found.is_enough or len(found.rows) > MOST_ROLLOUTS,
        unreadable=found.unreadable[:20],
        files=len(files),
        files_left=found.files_left,
    )


def _prompt(reader: ParquetReader, file: File, sample: str) -> str:
    """Question of the sample in a step."""
    asked = (
        "SELECT prompt_messages FROM read_parquet($file) "
        "WHERE CAST(sample_index AS VARCHAR) = $sample ORDER BY rollout_n DESC LIMIT 1"
    )
    return "".join(last_user_text(messages) for (messages,) in reader.query(asked, file, sample=sample))


def _answer(turns: str) -> str:
    """The beginning of the last message with a text."""
    texts = [message["content"] for turn in json.loads(turns) for message in turn["messages"]]
    return next((text for text in reversed(texts) if text.strip()), "")[:_ANSWER_CHARS]


_COUNT = 5
"""Place of the number of failures in a row of them."""
_ROWS = {
    "trajectory": _FROM,
    "call": f"FROM (SELECT *, unnest(json_extract(turns, '$[*].calls[*]')) AS call {_FROM} "
    'WHERE contains(turns, \'"error":"\'))',
    "incident": f"FROM (SELECT *, unnest(coalesce({CALLED}, [''])) AS service "
    f"FROM (SELECT *, unnest(incidents) AS incident {_FROM} WHERE len(incidents) > 0))",
}


def failures_page(reader: ParquetReader, results: FileResults, folder: RunFolder) -> FailuresPage:
    """Failures of the run, as far as it was read, by kind, code, service and message, whose numbers may differ."""

    def read(some: Sequence[File]) -> tuple[list[tuple[File, Row]], dict[File, str]]:
        found: list[tuple[File, Row]] = []
        unreadable: dict[File, str] = {}
        for kind, (selected, condition) in FAILURES.items():
            rows, damaged = reader.across(
                f"SELECT filename, code, tool, called, {pattern_of('message')}, any_value(message), count(*), "
                "max_by(CAST(sample_index AS VARCHAR), rollout_n), max(rollout_n), "
                "count(DISTINCT (sample_index, rollout_n)) "
                f"FROM (SELECT filename, sample_index, rollout_n, {selected} {_ROWS[kind]} WHERE {condition}) "
                "GROUP BY ALL",
                [file for file in some if file not in unreadable],
            )
            found += [(file, (kind, *row)) for file, row in rows]
            unreadable |= damaged
        return found, unreadable

    files = trajectory_files(folder)
    found = results.of(("failures", folder.path), files, read)
    failures: list[Failure] = []
    for kind in FAILURES:
        rows = [(file, row[1:]) for file, row in found.rows if row[0] == kind]
        rows.sort(key=lambda item: (*(part or "" for part in item[1][:4]), item[0].step, item[0].validation))
        failures += [_failure(kind, list(group)) for _, group in groupby(rows, key=lambda item: item[1][:4])]
    failures.sort(key=lambda failure: -failure.count)
    return FailuresPage(
        failures=failures[:MOST_GROUPS],
        unreadable=found.unreadable[:20],
        files=len(files),
        files_left=found.files_left,
    )


def _failure(kind: str, rows: list[tuple[File, tuple]]) -> Failure:
    newest, last = rows[-1]
    code, tool, called, pattern, message, _, sample, rollout, _ = last
    return Failure(
        kind=kind,
        code=code,
        tool=tool,
        message=message[:2000],
        pattern=pattern,
        infrastructure=is_infrastructure(kind, code),
        service=service_of(kind, code, tool, message, called),
        called=called,
        count=_count(rows),
        rollouts=sum(row[-1] for _, row in rows),
        steps=Series(
            steps=[file.step for file, _ in rows if not file.validation],
            values=[float(row[_COUNT]) for file, row in rows if not file.validation],
        ),
        validation=_count(item for item in rows if item[0].validation),
        example=TrajectoryAddress(step=newest.step, validation=newest.validation, sample=sample, rollout=rollout),
    )


def _count(rows: Iterable[tuple[File, tuple]]) -> int:
    return sum(row[_COUNT] for _, row in rows)
