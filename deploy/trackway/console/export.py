"""A step's rollouts as a file: CSV of their numbers, or JSONL of whole trajectories."""

import csv
import io
from collections.abc import Iterator

from trackway.console.steps import MOST_ROLLOUTS, step_page
from trackway.console.trajectory_files import ParquetReader, file_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_record import from_record

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
