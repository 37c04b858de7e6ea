"""The prompts of each step: batches in a seeded order per epoch, resumable at any position.

A position is a value and `take` is a pure function of it, so a resumed run sees exactly the prompts of an
uninterrupted run.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel

from trackway.run_config import RunConfig
from trackway.trainer.data.row_files import read_rows
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError

WITHOUT_TOOLS = "single_turn_agent"
"""The agent loop that offers no tools."""

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
_DEFAULT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


def agent_name_note(rows: Sequence[Sample], config: RunConfig) -> str | None:
    """The agent loop of rows without `agent_name` and how to change it, or None when every row has one."""
    missing = sum(not row.agent_name for row in rows)
    if not missing:
        return None
    loop, enabled = config.default_agent, config.actor_rollout_ref.rollout.multi_turn.enable
    because = f"{_MULTI_TURN}=true" if enabled else f"{_DEFAULT_LOOP}={loop}"
    known = {
        "tool_agent": f", in several turns with {_tools(config)}",
        "single_turn_agent": ", in one turn without tools",
    }
    change = "" if loop == "tool_agent" else f", or set {_MULTI_TURN}=true to give them tools"
    return (
        f"{missing} of {len(rows)} rows have no agent_name and run as {loop}{known.get(loop, '')} ({because}); "
        f"add the column agent_name to choose another{change}"
    )


def tools_kwargs_note(rows: Sequence[Sample]) -> str | None:
    """The number of rows with `need_tools_kwargs` but without `tools_kwargs`, or None when there are none."""
    without = sum(
        bool(row.extra_info.get("need_tools_kwargs")) and not row.extra_info.get("tools_kwargs") for row in rows
    )
    if not without:
        return None
    return (
        f"{without} of {len(rows)} rows have need_tools_kwargs and no tools_kwargs, so tools such as "
        "calc_gsm8k_reward get no ground truth; add extra_info.tools_kwargs"
    )


def _tools(config: RunConfig) -> str:
    names = config.trackway.tools
    if names is None:
        return "all tools of the tool server"
    return f"the tools {', '.join(names)}" if names else "no tools, as trackway.tools is empty"


Keep: TypeAlias = Callable[[Sequence[Sample], str], list[Sample]]
"""Selects the rows to keep. The second argument is the rows' name in the log."""


logger = logging.getLogger("trackway.trainer")

_ROWS_SHOWN = 5
"""Most rows named in a message. The others are counted."""


class RowLocation(NamedTuple):
    """The file and number of a row. Rows count from 1."""

    file: str
    number: int


@dataclass(frozen=True)
class Rows:
    """Rows of one or more files in order, with unique `extra_info.index`, and the location of each."""

    samples: list[Sample]
    locations: list[RowLocation]

    def at(self, positions: Sequence[int]) -> "Rows":
        """The rows at these positions, in this order."""
        return Rows([self.samples[position] for position in positions], [self.locations[at] for at in positions])

    def describe(self, positions: Sequence[int]) -> str:
        """`/d/train.parquet rows 3, 17, 40 and 2 more`: the first few of these rows, for a message."""
        shown = [self.locations[position] for position in positions[:_ROWS_SHOWN]]
        files = [
            f"{file} row{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
            for file, locations in groupby(shown, key=lambda location: location.file)
            for numbers in [[str(location.number) for location in locations]]
        ]
        more = len(positions) - len(shown)
        return "; ".join(files) + (f" and {more} more" if more else "")


@dataclass(frozen=True)
class RowChoice:
    """The rows to take where their number is bounded (`trackway.max_samples`)."""

    most: int = -1
    """Most rows. -1 takes all."""
    seed: int | None = None
    """Seed of a random choice. None takes the first rows."""
    of_kept: bool = False
    """Choose among the rows that are kept, instead of among all of them."""

    @classmethod
    def of(cls, config: RunConfig, most: int) -> Self:
        """The choice of at most so many rows of a run."""
        if config.trackway.max_samples == "first":
            return cls(most, of_kept=True)
        return cls(most or -1, config.data_seed if config.data.shuffle else None)

    def positions(self, total: int) -> list[int]:
        """The positions of the rows taken of `total`, in the order in which they are taken.

        verl 0.9.1 draws the same ones from the same `data.seed` (verl/utils/dataset/rl_dataset.py).
        """
        if not 0 <= self.most < total:
            return list(range(total))
        if self.seed is None:
            return list(range(self.most))
        generator = np.random.default_rng(self.seed % 2**64)
        return generator.choice(total, size=self.most, replace=False).tolist()


ALL_ROWS = RowChoice()


class Position(BaseModel):
    """The number of batches taken, as whole epochs and batches of the current epoch."""

    epoch: int = 0
    batch: int = 0


Row = TypeVar("Row")


class PromptBatches(Protocol):
    """Prompts of each step. `take` is a pure function of the position."""

    steps_per_epoch: int

    def take(self, position: Position) -> tuple[list[Sample], Position]:
        """The batch at a position, and the position after it."""
        ...


class Prompts(Generic[Row]):
    """Rows in batches of `batch_size`. With `drop_last` the incomplete batch at the end of an epoch is left out.

    Raises TrackwayError(INVALID_REQUEST) when an epoch has no batch.
    """

    def __init__(self, rows: Sequence[Row], batch_size: int, seed: int, shuffle: bool, drop_last: bool = True) -> None:
        self.steps_per_epoch = steps_per_epoch(len(rows), batch_size, drop_last)
        """Batches in one pass over the rows."""
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._draw_order)  # generation may be an epoch ahead of the learner

    def take(self, position: Position) -> tuple[list[Row], Position]:
        """The batch at a position, and the position after it. Past the last batch, the next epoch begins."""
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
    """Batches in one pass over `rows` rows. Raises TrackwayError(INVALID_REQUEST) when there is none."""
    whole, rest = divmod(rows, batch_size)
    steps = whole if drop_last or not rest else whole + 1
    if steps:
        return steps
    needed = f"at least data.train_batch_size={batch_size} rows" if rows else "rows to train on"
    remedy = "lower it, or set data.drop_last=false" if rows else "check data.train_files"
    raise TrackwayError(ErrorCode.INVALID_REQUEST, f"expected {needed}, got {rows}; {remedy}")


def load_data(config: RunConfig, keep: Keep | None = None) -> tuple[Rows, Rows]:
    """The rows to train on and the rows to validate on; logs warnings about them."""
    data = config.data
    train = load_rows(data.train_files, RowChoice.of(config, data.train_max_samples), keep, data.columns)
    held_out = load_rows(data.val_files, RowChoice.of(config, data.val_max_samples), keep, data.columns)
    rows = [*train.samples, *held_out.samples]
    for note in filter(None, (agent_name_note(rows, config), tools_kwargs_note(rows))):
        logger.warning(note)
    return train, held_out


def prompts_of(config: RunConfig, rows: Sequence[Row]) -> Prompts[Row]:
    """The rows to train on, in batches. Raises TrackwayError(INVALID_REQUEST) when an epoch has no batch."""
    data = config.data
    return Prompts(rows, data.train_batch_size, config.data_seed, data.shuffle, data.drop_last)


def load_rows(
    files: Sequence[str],
    choice: RowChoice = ALL_ROWS,
    keep: Keep | None = None,
    columns: Mapping[str, str] | None = None,
) -> Rows:
    """The chosen rows of all files, each with a unique `extra_info.index`; `columns` as for `read_rows`.

    If indices are missing or repeat, as with several files, each row's position replaces its index, because the index
    names the trajectories. Raises TrackwayError when a file is missing or invalid, or no row is kept.
    """
    located = [
        (RowLocation(file, number), row)
        for file in files
        for number, row in enumerate(read_rows(Path(file), columns), start=1)
    ]
    total = len(located)
    if not choice.of_kept:
        located = [located[position] for position in choice.positions(total)]
    samples, locations = [row for _, row in located], [location for location, _ in located]
    if keep and samples:
        kept, candidates = keep(samples, ", ".join(files)), iter(located)
        # `keep` preserves the order, so one pass finds the locations.
        locations = [next(location for location, candidate in candidates if candidate is row) for row in kept]
        samples = kept
    if choice.of_kept:
        taken = choice.positions(len(samples))
        samples, locations = [samples[position] for position in taken], [locations[position] for position in taken]
    if 0 <= choice.most < total:
        manner = "the first" if choice.seed is None else f"at random by seed {choice.seed}"
        logger.info("%s: took %d of %d rows, %s", ", ".join(files), len(samples), total, manner)
    indices = {row.index for row in samples}
    if len(indices) < len(samples):
        samples = [_with_index(row, position) for position, row in enumerate(samples)]
    return Rows(samples, locations)


def traced_positions(seed: int, step: int, size: int, count: int) -> frozenset[int]:
    """The `count` of a batch's `size` positions that are traced in a step."""
    return frozenset(random.Random(f"trace/{seed}/{step}").sample(range(size), min(count, size)))


def _with_index(row: Sample, index: int) -> Sample:
    return row.model_copy(update={"extra_info": {**row.extra_info, "index": index}})
