"""The layout of one forward pass, and the tensors that all layers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_WORTH_A_CUT = 512
"""Wasted cache positions that cost as much as another attention call: some 256 KiB of a small model's cache."""


class Row(NamedTuple):
    """New tokens of one sequence, whose first `start` tokens are in the cache's `slot`."""

    slot: int
    start: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        """Tokens in the slot afterwards."""
        return self.start + len(self.token_ids)


class DecodeRun(NamedTuple):
    """Rows of one new token each, computed in one attention call."""

    first: int
    """Index of the first token in the flat batch."""
    last: int
    slots: slice | Tensor
    mask: Tensor
    """[rows * kv_heads, 1, longest]: added to the scores."""

    @property
    def longest(self) -> int:
        """The most positions that a row attends to."""
        return self.mask.shape[2]


class PrefillRow(NamedTuple):
    """A row of several new tokens: its place in the flat batch and in the cache."""

    slot: int
    first: int
    last: int
    end: int
    mask: Tensor | None
    """[new, end]: the positions that each new token sees, or None when causal from the start of the slot."""


@dataclass(frozen=True)
class BatchLayout:
    """A flat batch without padding: rows of one new token first, as runs; then longer rows, as spans."""

    token_ids: Tensor
    """[tokens]"""
    slots: Tensor
    """[tokens]: each token's slot."""
    positions: Tensor
    """[tokens]: each token's position in its slot."""
    runs: list[DecodeRun]
    spans: list[PrefillRow]
    last: Tensor | None
    """[rows]: index of each row's last token, or None when every row has one token."""


def prepare_batch(rows: Sequence[Row], kv_heads: int, device: torch.device, dtype: torch.dtype) -> BatchLayout:
    """The layout of a batch. Rows of one new token come first."""
    singles = sum(len(row.token_ids) == 1 for row in rows)
    flat = [
        [token for row in rows for token in row.token_ids],
        [row.slot for row in rows for _ in row.token_ids],
        [position for row in rows for position in range(row.start, row.end)],
    ]
    token_ids, slots, positions = torch.tensor(flat).to(device, non_blocking=True)
    spans = _spans(rows[singles:], singles, device)
    last = [*range(singles), *(span.last for span in spans)]
    parts = [range(singles)] if device.type != "cpu" and singles else cut(rows[:singles])
    return BatchLayout(
        token_ids=token_ids,
        slots=slots,
        positions=positions,
        runs=[_run(rows, part, slots, positions, kv_heads, dtype) for part in parts],
        spans=spans,
        last=torch.tensor(last, device=device) if spans else None,
    )


def cut(rows: Sequence[Row]) -> list[range]:
    """Splits rows into parts of adjacent slots and similar length, which a CPU reads in place with little waste."""
    parts: list[range] = []
    first = longest = used = 0
    for index, row in enumerate(rows):
        longest, used = max(longest, row.end), used + row.end
        gap = row.slot - rows[first].slot != index - first
        if gap or longest * (index - first + 1) - used > _WORTH_A_CUT:
            parts.append(range(first, index))
            first, longest, used = index, row.end, row.end
    return [*parts, range(first, len(rows))] if rows else []


def neighbours(slots: list[int]) -> slice | None:
    """The slice equal to the slots in their order, or None."""
    first = slots[0]
    return slice(first, first + len(slots)) if slots == list(range(first, first + len(slots))) else None


def _run(
    rows: Sequence[Row], part: range, slots: Tensor, positions: Tensor, kv_heads: int, dtype: torch.dtype
) -> DecodeRun:
    where = slice(part.start, part.stop)
    row_slots = [row.slot for row in rows[where]]
    mask = _single_mask(positions[where], max(row.end for row in rows[where]), kv_heads, dtype)
    return DecodeRun(part.start, part.stop - 1, neighbours(row_slots) or slots[where], mask)


def _spans(rows: Sequence[Row], first: int, device: torch.device) -> list[PrefillRow]:
    spans: list[PrefillRow] = []
    for row in rows:
        new = len(row.token_ids)
        mask = torch.ones(new, row.end, dtype=torch.bool, device=device).tril(row.start) if row.start else None
        spans.append(PrefillRow(row.slot, first, first + new - 1, row.end, mask))
        first += new
    return spans


def _single_mask(positions: Tensor, longest: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.arange(longest, device=positions.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, device=positions.device, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(kv_heads, dim=0)[:, None]
