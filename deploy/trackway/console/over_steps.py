"""Queries over all steps of a run, file by file: one prompt, and failures by their cause."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trackway.console.replies import Failure, FailuresPage, PromptPage, PromptRollout, Series, TrajectoryAddress
from trackway.console.runs import finite
from trackway.console.search import CALLED, FAILURES, is_infrastructure, pattern_of, service_of
from trackway.console.steps import last_user_text
from trackway.console.trajectory_files import TOGETHER, File, ParquetReader, trajectory_files
from trackway.trainer.run_state.folder import RunFolder

BUDGET_S = 0.3
"""Seconds after which a request answers with what it has."""
FIRST_TOGETHER = 4
"""Files of the first query of a request, so that something is shown soon. Each further one has twice as many."""
_MOST_KEPT = 16
"""Queries whose results are kept."""

Row = tuple[Any, ...]
Read = Callable[[Sequence[File]], tuple[list[tuple[File, Row]], dict[File, str]]]
"""The rows of some files, and why others could not be read."""


@dataclass(frozen=True)
class Found:
    """Results so far."""

    rows: list[tuple[File, Row]]
    """In the order of the files."""
    unreadable: list[str]
    files_left: int
    """Files that a further request reads."""
    is_enough: bool
    """True if older files were left out, as those read have enough rows."""


@dataclass(frozen=True)
class _Result:
    rows: list[Row]
    unreadable: str | None


class FileResults:
    """Results by query and file. A file that is written again is read again, as its size or time differs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = OrderedDict[Hashable, dict[File, _Result]]()

    def of(self, query: Hashable, files: Sequence[File], read: Read, enough: int | None = None) -> Found:
        """The rows of the files, the newest read first, within BUDGET_S. `enough` rows of the newest end it too."""
        with self._lock:
            before = self._kept.get(query, {})
        kept = {file: before[file] for file in files if file in before}
        ended = time.monotonic() + BUDGET_S
        newest, missing = list(reversed(files)), [file for file in reversed(files) if file not in kept]
        is_enough, together = False, FIRST_TOGETHER
        while missing:
            if enough is not None and _rows_before(missing[0], newest, kept) >= enough:
                missing, is_enough = [], True
                break
            together = min(together, TOGETHER)
            batch, missing, together = missing[:together], missing[together:], 2 * together
            rows, unreadable = read(batch)
            by_file: dict[File, list[Row]] = {file: [] for file in batch}
            for file, row in rows:
                by_file[file].append(row)
            kept |= {file: _Result(found, unreadable.get(file)) for file, found in by_file.items()}
            if time.monotonic() >= ended:
                break
        with self._lock:
            self._kept[query] = kept
            self._kept.move_to_end(query)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        known = [(file, kept[file]) for file in files if file in kept]
        return Found(
            rows=[(file, row) for file, result in known for row in result.rows],
            unreadable=[result.unreadable for _, result in known if result.unreadable is not None],
            files_left=len(missing),
            is_enough=is_enough,
        )


def _rows_before(file: File, newest: Sequence[File], kept: dict[File, _Result]) -> int:
    """Rows of the files that are newer."""
    return sum(len(kept[other].rows) for other in newest[: newest.index(file)] if other in kept)


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
