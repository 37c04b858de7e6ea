"""The files of trajectories in a run's folder, and DuckDB's reader of them."""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackway.trainer.run_state.folder import TOKEN_VALUES, RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    import duckdb

_NAME = re.compile(r"(val_)?step_(\d+)\.parquet")
MEMORY = "512MB"
"""Most memory of all queries together. DuckDB fails a query that needs more."""
THREADS = 2
TOGETHER = 64
"""Files of one query over many."""


@dataclass(frozen=True)
class File:
    """A file of trajectories."""

    path: Path
    step: int
    validation: bool
    bytes: int
    changed_ns: int
    """When it was written: a resumed run writes its steps again, often with the same size."""


def trajectory_files(folder: RunFolder) -> list[File]:
    """The files in the order of the steps, validation after training; none without the folder."""
    found = []
    try:
        paths = list((folder.path / "trajectories").iterdir())
    except OSError:
        return []
    for path in paths:
        named = _NAME.fullmatch(path.name)
        file = named and _file(path, int(named[2]), named[1] is not None)
        if file is not None:
            found.append(file)
    return sorted(found, key=lambda file: (file.step, file.validation))


def token_values_of(folder: RunFolder, step: int) -> File | None:
    """The file of a step's token values, or None without one."""
    return _file(folder.path / TOKEN_VALUES / f"step_{step}.parquet", step, False)


def _file(path: Path, step: int, validation: bool) -> File | None:
    """None for a file that is gone."""
    try:
        known = path.stat()
    except OSError:
        return None
    return File(path, step, validation, known.st_size, known.st_mtime_ns)


def file_of(folder: RunFolder, step: int, validation: bool) -> File:
    """The file of a step. Raises TrackwayError(NOT_FOUND)."""
    files = trajectory_files(folder)
    for file in files:
        if (file.step, file.validation) == (step, validation):
            return file
    steps = [file.step for file in files if file.validation == validation]
    kind = "a validated step" if validation else "a step"
    known = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
    message = f"expected {kind} of run {folder.name} ({known}), got {step}; choose another step"
    raise TrackwayError(ErrorCode.NOT_FOUND, message)


class ParquetReader:
    """Runs queries over parquet files. DuckDB is imported at the first query, so that the page opens sooner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None

    def rows_within(self, file: File, size: int, column: str = "") -> tuple[int, int]:
        """Return how many rows (at least one) have about `size` bytes in a column or in all, and the file's rows."""
        [(total, count)] = self.query(
            "SELECT coalesce(sum(total_uncompressed_size) FILTER ($column IN ('', path_in_schema)), 0), "
            "coalesce(sum(row_group_num_rows) FILTER (column_id = 0), 0) FROM parquet_metadata($file)",
            file,
            column=column,
        )
        return max(1, count * size // max(1, total)), count

    def query(self, sql: str, file: File, **values: object) -> list[tuple[Any, ...]]:
        """The rows of a query over `read_parquet($file)`.

        Raises TrackwayError: NOT_FOUND when the file is gone, CONFLICT when it cannot be read, OVERLOADED when that
        needs more than MEMORY.
        """
        import duckdb

        try:
            return self._cursor().execute(sql, {"file": str(file.path), **values}).fetchall()
        except duckdb.Error as error:
            raise self._unreadable(file, error) from error

    def records(self, sql: str, file: File, **values: object) -> list[dict[str, Any]]:
        """The rows of a query by column. Raises TrackwayError as `query` does."""
        import duckdb

        try:
            cursor = self._cursor().execute(sql, {"file": str(file.path), **values})
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            raise self._unreadable(file, error) from error

    def check_regex(self, regex: str) -> None:
        """Raises TrackwayError(INVALID_REQUEST) unless it is a regular expression that DuckDB can read."""
        import duckdb

        try:
            self._cursor().execute("SELECT regexp_matches('', $regex)", {"regex": regex}).fetchall()
        except duckdb.Error as error:
            reason = str(error).partition("\n")[0]
            message = f"expected a regular expression (RE2), got {regex!r}: {reason}; escape signs with a backslash"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error

    def across(
        self, sql: str, files: Sequence[File], **values: object
    ) -> tuple[list[tuple[File, tuple[Any, ...]]], dict[File, str]]:
        """The rows of a query over `read_parquet($files)` by file, and why other files cannot be read.

        The query's first column is `filename`.
        """
        import duckdb

        rows: list[tuple[File, tuple[Any, ...]]] = []
        unreadable: dict[File, str] = {}
        pending = [list(files[start : start + TOGETHER]) for start in range(0, len(files), TOGETHER)]
        while pending:
            batch = pending.pop(0)
            by_name = {str(file.path): file for file in batch}
            try:
                found = self._cursor().execute(sql, {"files": list(by_name), **values}).fetchall()
            except duckdb.Error as error:
                if len(batch) == 1:
                    unreadable[batch[0]] = self._unreadable(batch[0], error).message
                else:  # one of them is damaged
                    pending[:0] = [[file] for file in batch]
                continue
            rows += [(by_name[row[0]], row[1:]) for row in found]
        return rows, unreadable

    def _cursor(self) -> "duckdb.DuckDBPyConnection":
        """A connection for this request. Requests run in threads."""
        import duckdb

        with self._lock:
            if self._connection is None:
                self._connection = duckdb.connect(
                    config={
                        "memory_limit": MEMORY,
                        "threads": THREADS,
                        "temp_directory": "",  # nothing is spilled to a disk
                        "autoinstall_known_extensions": False,  # nothing is fetched
                        "autoload_known_extensions": False,
                    }
                )
            return self._connection.cursor()

    @staticmethod
    def _unreadable(file: File, error: Exception) -> TrackwayError:
        import duckdb

        if not file.path.exists():
            message = f"expected {file.path}, which is gone; reload the page"
            return TrackwayError(ErrorCode.NOT_FOUND, message)
        reason = str(error).partition("\n")[0]
        if isinstance(error, duckdb.OutOfMemoryException):
            message = (
                f"expected {file.path} to be read with {MEMORY} of memory, got more; ask for less of it ({reason})"
            )
            return TrackwayError(ErrorCode.OVERLOADED, message)
        message = (
            f"expected trajectories in {file.path}, got a file that cannot be read ({reason}); look at another step, "
            "or resume the run if its newest checkpoint is of an earlier one"
        )
        return TrackwayError(ErrorCode.CONFLICT, message)
