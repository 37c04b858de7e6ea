"""Reading the rows of metrics.jsonl that a backend does not have yet, without reading those that it has."""

import os
import re
from pathlib import Path

from trackway.wire.trainer import MetricsRow

_BLOCK = 1 << 16
_STEP = re.compile(rb'\{"step":\s*(-?\d+)')


class RowReader:
    """Rows in the order of the file, in which steps grow; what is cut off or damaged is left out."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def after(self, step: int, values: int) -> list[MetricsRow]:
        """The first rows after the step: as many as have `values` values together, and one at least."""
        found: list[MetricsRow] = []
        taken = 0
        for line in self._lines_after(step):
            try:
                row = MetricsRow.model_validate_json(line)
            except ValueError:
                continue
            taken += len(row.data)
            if found and taken > values:
                break
            found.append(row)
        return found

    def count_after(self, step: int) -> int:
        """How many rows there are after the step."""
        return len(self._lines_after(step))

    def _lines_after(self, step: int) -> list[bytes]:
        """Read from the end, block by block, until a row of the step or an earlier one."""
        try:
            with self._file.open("rb") as file:
                place = file.seek(0, os.SEEK_END)
                tail = b""
                while place > 0:
                    size = min(max(_BLOCK, len(tail)), place)
                    place -= size
                    file.seek(place)
                    tail = file.read(size) + tail
                    first = tail.find(b"\n") + 1 if place else 0  # what is before it is the end of a line
                    if (earliest := _STEP.match(tail, first)) and int(earliest[1]) <= step:
                        break
        except FileNotFoundError:
            return []
        lines = tail.split(b"\n")[:-1]  # after the last line end nothing is complete
        return [line for line in lines if (found := _STEP.match(line)) and int(found[1]) > step]
