"""Results of a query for each file of a run, so that a long one answers in parts."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from trackway.console.trajectory_files import TOGETHER, File

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
