"""Traces as rows of a list, and their order."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from datetime import datetime

from pydantic import BaseModel, JsonValue

from trackway.system.user_error import UserError
from trackway.traces import views
from trackway.traces.tree import TraceTree


class TraceRow(BaseModel):
    """One trace in a list."""

    trace_id: str
    name: str
    state: str
    tags: dict[str, str]
    started: datetime
    duration_ms: float | None
    reward: float | None
    advantage: JsonValue
    fate: JsonValue
    turns: int
    """Turns of the model."""
    prompt_tokens: int | None
    response_tokens: int | None
    weight_versions: str
    answer: str
    """The last text of the model; empty without token2text."""


def row(tree: TraceTree) -> TraceRow:
    """A trace as a row."""
    tokens = views.tokens_in(tree)
    return TraceRow(
        trace_id=tree.trace_id,
        name=tree.name,
        state=tree.state,
        tags=tree.tags,
        started=tree.started,
        duration_ms=tree.duration_ms,
        reward=views.reward_of(tree),
        advantage=tree.feedback.get("advantage"),
        fate=tree.feedback.get("fate"),
        turns=len(tree.of_kind("turn")),
        prompt_tokens=tokens.prompt if tokens else None,
        response_tokens=tokens.response if tokens else None,
        weight_versions=views.weight_versions(tree),
        answer=views.answer_of(tree),
    )


Key = float | str | tuple[bool, float, str]


def _sample(index: str | None) -> Key | None:
    """Sort key: numbers in their order, then texts in theirs."""
    number = views.number(index)
    return None if index is None else (number is None, number or 0.0, index)


_KEYS: dict[str, Callable[[TraceRow], Key | None]] = {
    "time": lambda row: row.started.timestamp(),
    "step": lambda row: views.number(row.tags.get("step", row.tags.get("train_step"))),
    "sample": lambda row: _sample(row.tags.get("sample_index")),
    "reward": lambda row: row.reward,
    "turns": lambda row: row.turns,
    "tokens": lambda row: row.response_tokens,
    "ms": lambda row: row.duration_ms,
    "name": lambda row: row.name,
}

NEWEST_FIRST = "-time"
SORTS = ", ".join(_KEYS)
"""Keys by which a list can be sorted."""


def ordered(rows: Iterable[TraceRow], sort: str, limit: int) -> list[TraceRow]:
    """The first `limit` rows by `key`, or descending by `-key`; rows without a value come last.

    Rows arrive newest first, so that order stops reading early; any other keeps only `limit` rows in memory.

    Raises:
        UserError: the key is unknown.
    """
    if sort == NEWEST_FIRST:
        return list(itertools.islice(rows, limit))
    key = _KEYS.get(sort.removeprefix("-"))
    if key is None:
        raise UserError(f"--sort: expected one of {SORTS}, or -KEY for the greatest first, got {sort!r}")
    placed = ((key(row), row) for row in rows)
    if sort.startswith("-"):
        return [row for _, row in heapq.nlargest(limit, placed, key=lambda pair: _greatest_first(pair[0]))]
    return [row for _, row in heapq.nsmallest(limit, placed, key=lambda pair: _least_first(pair[0]))]


def _greatest_first(value: Key | None) -> tuple[bool, Key]:
    return (False, 0) if value is None else (True, value)


def _least_first(value: Key | None) -> tuple[bool, Key]:
    return (True, 0) if value is None else (False, value)
