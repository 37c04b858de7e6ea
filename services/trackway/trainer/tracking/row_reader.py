"""Reads the new rows of metrics.jsonl from the end of the file, without reading the rows already sent."""

import os
import re
from pathlib import Path

from trackway.wire.trainer import MetricsRow

_BLOCK = 1 << 16
_STEP = re.compile(rb'\{"step":\s*(-?\d+)')


class RowReader:
    """Rows in file order, by increasing step; truncated and damaged lines are skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def after(self, step: int, values: int) -> list[MetricsRow]:
        """The first rows after the step, with at most `values` values in total, but at least one row."""
        rows: list[MetricsRow] = []
        count = 0
        for line in self._lines_after(step):
            try:
                row = MetricsRow.model_validate_json(line)
            except ValueError:
                continue
            count += len(row.data)
            if rows and count > values:
                break
            rows.append(row)
        return rows

    def count_after(self, step: int) -> int:
        """The number of rows after the step."""
        return len(self._lines_after(step))

    def _lines_after(self, step: int) -> list[bytes]:
        """Read backwards in blocks until a row of the step or an earlier one."""
        try:
            with self._file.open("rb") as file:
                offset = file.seek(0, os.SEEK_END)
                tail = b""
                while offset > 0:
                    size = min(max(_BLOCK, len(tail)), offset)
                    offset -= size
                    file.seek(offset)
                    tail = file.read(size) + tail
                    first = tail.find(b"\n") + 1 if offset else 0  # skip the partial line at the block's start
                    if (earliest := _STEP.match(tail, first)) and int(earliest[1]) <= step:
                        break
        except FileNotFoundError:
            return []
        lines = tail.split(b"\n")[:-1]  # without the incomplete last line
        return [line for line in lines if (match := _STEP.match(line)) and int(match[1]) > step]
