"""Which rows a forward pass computes: micro-batches of limited size, for one process or balanced over several ranks.

The ranks of a sharded learner gather weights from one another in each pass, so every rank makes the same number of
passes, or the others wait for it until their deadline. Rows are therefore planned in rounds: in a round each rank has
one micro-batch, of about as many tokens as on the other ranks, since a round takes as long as its largest one.
A rank may have none in a round, where rows are fewer than ranks. Sums over rows are divided by totals of the whole
mini-batch (algorithm.py), so losses and gradients do not depend on the plan.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Rows: TypeAlias = list[int]
"""Indices of the rows of one micro-batch."""


class PassLimit(NamedTuple):
    """Limits of what one rank computes in one pass."""

    rows: int | None = None
    """Most rows, without `tokens`, or None for all."""
    tokens: int | None = None
    """Most tokens, whatever the number of rows. A longer row is computed alone."""


def rounds_of(
    lengths: Sequence[int], limit: PassLimit, ranks: int = 1, *, has_padding: bool = False
) -> list[list[Rows]]:
    """Rounds by ranks by rows: every row is in one micro-batch. `lengths` are the tokens of the rows.

    With `has_padding` the longest row of a micro-batch counts for each of them. Under a limit
    by rows, no rank has more than its share of a round's rows, rounded up. One by tokens takes as few micro-batches as
    balanced ones allow.
    """
    if limit.tokens is not None:
        return _by_tokens(lengths, limit.tokens, ranks, has_padding)
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    size = ranks * (limit.rows or len(lengths))
    return [_dealt(lengths, ascending[start : start + size], ranks) for start in range(0, len(ascending), size)]


def balanced(lengths: Sequence[int], parts: int, most_rows: int | None = None) -> list[Rows]:
    """The rows in parts of about as many tokens: the longest row first, each to the part with the fewest tokens.

    A part has at most `most_rows` rows, or None for no bound. Rows are in ascending order. The largest part exceeds the
    best possible by at most a third (Graham, Bounds on multiprocessing timing anomalies, 1969) without that bound.
    """
    members: list[Rows] = [[] for _ in range(parts)]
    tokens = [(0, part) for part in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        count, part = heapq.heappop(tokens)
        members[part].append(row)
        if most_rows is None or len(members[part]) < most_rows:
            heapq.heappush(tokens, (count + lengths[row], part))
    return [sorted(rows) for rows in members]


def _dealt(lengths: Sequence[int], rows: Rows, ranks: int) -> list[Rows]:
    """These rows, one part for each rank; of one rank in the order given."""
    if ranks == 1:
        return [rows]
    parts = balanced([lengths[row] for row in rows], ranks, -(-len(rows) // ranks))
    return [[rows[place] for place in part] for part in parts]


def _by_tokens(lengths: Sequence[int], most: int, ranks: int, has_padding: bool) -> list[list[Rows]]:
    parts = _of_like_length(lengths, most) if has_padding else _fewest(lengths, most, ranks)
    # Micro-batches of one round are neighbours by size, so that no rank waits long for another.
    parts.sort(key=lambda part: sum(lengths[row] for row in part))
    parts = [[]] * (-len(parts) % ranks) + parts
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


def _fewest(lengths: Sequence[int], most: int, ranks: int) -> list[Rows]:
    """Balanced parts of at most `most` tokens, or of one row. Their number is a multiple of the ranks if rows allow."""
    count = max(1, -(-sum(lengths) // most))
    while True:
        count = min(-(-count // ranks) * ranks, len(lengths))
        parts = balanced(lengths, count)
        if all(len(part) == 1 or sum(lengths[row] for row in part) <= most for part in parts):
            return parts
        count += 1


def _of_like_length(lengths: Sequence[int], most: int) -> list[Rows]:
    """Parts of neighbours by length, each at most `most` tokens with its padding, or one row."""
    parts: list[Rows] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= most:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts
