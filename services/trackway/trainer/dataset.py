"""Which prompts a step trains on: a seeded order per epoch in batches, resumable at any position.

A position is a value and `take` is a pure function of it, so a resumed run sees exactly the prompts that an
uninterrupted one would have seen.
"""

import logging
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel

from trackway.trainer.config import RunConfig
from trackway.trainer.data.parquet import read_rows
from trackway.trainer.row_notes import agent_name_note, tools_kwargs_note
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError

Keep: TypeAlias = Callable[[Sequence[Sample], str], list[Sample]]
"""Chooses the rows that are kept, given also the name that the log calls them by."""


logger = logging.getLogger("trackway.trainer")


class Position(BaseModel):
    """How many batches have been taken, as epochs and batches of the current epoch."""

    epoch: int = 0
    batch: int = 0


class Prompts:
    """Rows in batches of `batch_size`; with `drop_last` the incomplete batch at the end of an epoch is left out.

    Raises TrackwayError(INVALID_REQUEST) when no batch would be left.
    """

    def __init__(
        self, rows: Sequence[Sample], batch_size: int, seed: int, shuffle: bool, drop_last: bool = True
    ) -> None:
        self.steps_per_epoch = steps_per_epoch(len(rows), batch_size, drop_last)
        """Batches in one pass over the rows."""
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=1)(self._draw_order)

    def take(self, position: Position) -> tuple[list[Sample], Position]:
        """The batch at a position, and the position after it; one behind the last batch is the next epoch's first."""
        if position.batch >= self.steps_per_epoch:
            position = Position(epoch=position.epoch + 1)
        start = position.batch * self._batch_size
        batch = [self._rows[row] for row in self._order(position.epoch)[start : start + self._batch_size]]
        after = position.batch + 1
        if after == self.steps_per_epoch:
            return batch, Position(epoch=position.epoch + 1)
        return batch, Position(epoch=position.epoch, batch=after)

    def _draw_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def steps_per_epoch(rows: int, batch_size: int, drop_last: bool) -> int:
    """Batches in one pass over so many rows. Raises TrackwayError(INVALID_REQUEST) when there is none."""
    whole, rest = divmod(rows, batch_size)
    steps = whole if drop_last or not rest else whole + 1
    if steps:
        return steps
    needed = f"at least data.train_batch_size={batch_size} rows" if rows else "rows to train on"
    remedy = "make it smaller, or set data.drop_last=false" if rows else "look at data.train_files"
    raise TrackwayError(ErrorCode.INVALID_REQUEST, f"expected {needed}, got {rows}; {remedy}")


def load_data(config: RunConfig, keep: Keep | None = None) -> tuple[Prompts, list[Sample]]:
    """The prompts to train on and the rows to validate on; what should be known of them is logged once."""
    data = config.data
    train = load_samples(data.train_files, data.train_max_samples, keep)
    seed = config.trackway.seed if data.seed is None else data.seed
    prompts = Prompts(train, data.train_batch_size, seed, data.shuffle, data.drop_last)
    held_out = load_samples(data.val_files, data.val_max_samples, keep)
    rows = [*train, *held_out]
    for note in filter(None, (agent_name_note(rows, config), tools_kwargs_note(rows))):
        logger.warning(note)
    return prompts, held_out


def load_samples(files: Sequence[str], max_samples: int = -1, keep: Keep | None = None) -> list[Sample]:
    """The rows of all files in order, each with an `extra_info.index` of its own.

    Rows that are not kept are dropped before the first `max_samples` are taken. Where indices are missing or repeat
    (several files), the row's position replaces them, because the index names the trajectories. Raises TrackwayError
    when a file is missing or no row file, or no row is kept.
    """
    rows = [row for file in files for row in read_rows(Path(file))]
    kept = keep(rows, ", ".join(files)) if keep and rows else rows
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
