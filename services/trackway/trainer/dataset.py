"""Which prompts a step trains on: a seeded order per epoch, whole batches only, resumable at any position.

A position is a value and `take` is a pure function of it, so a resumed run sees exactly the prompts that an
uninterrupted one would have seen.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from trackway.trainer.data.parquet import read_rows
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError


class Position(BaseModel):
    """How many batches have been taken, as epochs and batches of the current epoch."""

    epoch: int = 0
    batch: int = 0


class Prompts:
    """Rows in batches of `batch_size`; the incomplete batch at the end of an epoch is dropped.

    Raises TrackwayError(INVALID_REQUEST) when there are fewer rows than one batch needs.
    """

    def __init__(self, rows: Sequence[Sample], batch_size: int, seed: int, shuffle: bool) -> None:
        if len(rows) < batch_size:
            message = f"expected at least data.train_batch_size={batch_size} rows, got {len(rows)}; make it smaller"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the rows."""
        return len(self._rows) // self._batch_size

    def take(self, position: Position) -> tuple[list[Sample], Position]:
        """The batch at a position, and the position after it."""
        start = position.batch * self._batch_size
        batch = [self._rows[row] for row in self._order(position.epoch)[start : start + self._batch_size]]
        after = position.batch + 1
        if after == self.steps_per_epoch:
            return batch, Position(epoch=position.epoch + 1)
        return batch, Position(epoch=position.epoch, batch=after)

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def load_samples(
    files: Sequence[str], max_samples: int = -1, fits: Callable[[Sample], bool] | None = None
) -> list[Sample]:
    """The rows of all files in order, each with an `extra_info.index` of its own.

    Rows that do not fit are dropped first. Where indices are missing or repeat (several files), the row's position
    replaces them, because the index names the trajectories. Raises TrackwayError when a file is missing or no row file.
    """
    rows = [row for file in files for row in read_rows(Path(file))]
    kept = [row for row in rows if fits is None or fits(row)]
    kept = kept if max_samples < 0 else kept[:max_samples]
    indices = {row.index for row in kept}
    if len(indices) == len(kept):
        return kept
    return [_with_index(row, position) for position, row in enumerate(kept)]


def traced_positions(seed: int, step: int, size: int, count: int) -> frozenset[int]:
    """Which `count` of a batch's `size` positions are traced in a step."""
    return frozenset(random.Random(f"trace/{seed}/{step}").sample(range(size), min(count, size)))


def _with_index(row: Sample, index: int) -> Sample:
    return row.model_copy(update={"extra_info": {**row.extra_info, "index": index}})
