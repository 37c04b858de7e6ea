"""The interface of readable trace backends, and the filters they support."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Protocol

from trackway.system.process import UserError
from trackway.traces.tree import TraceTree
from trackway.traces.views import number, reward_of


class TraceKind(StrEnum):
    """The kinds of traces."""

    TRAJECTORY = "trajectory"
    STEP = "step"
    """A trainer's step: its optimiser steps, linked to the trajectories they consumed."""

    @property
    def step_tag(self) -> str:
        """The tag with the step, unique to traces of this kind."""
        return "step" if self is TraceKind.TRAJECTORY else "train_step"


@dataclass(frozen=True)
class Steps:
    """An inclusive range of steps. Open if `last` is None."""

    first: int = 0
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Steps":
        """Parse `3`, `3-7`, `3-` or `-7`. Raises UserError for anything else."""
        low, dash, high = text.strip().partition("-")
        ends = [end for end in (low, high) if end]
        if not ends or not all(end.isdecimal() for end in ends):
            raise UserError(f"--step: expected 3, 3-7 or 3-, got {text!r}")
        first = int(low) if low else 0
        last = first if not dash else int(high) if high else None
        if last is not None and last < first:
            raise UserError(f"--step: expected a range that goes up, got {text!r}")
        return cls(first, last)

    def __contains__(self, step: float) -> bool:
        return self.first <= step <= (math.inf if self.last is None else self.last)


@dataclass(frozen=True)
class TraceFilter:
    """Filters of traces."""

    kind: TraceKind = TraceKind.TRAJECTORY
    tags: Mapping[str, str] = field(default_factory=dict)
    """Required values by tag. `*` matches any text."""
    steps: Steps | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    span: str = ""
    """Required name of a span, ours or a framework's. `*` matches any text."""

    def matches(self, tree: TraceTree) -> bool:
        """Return whether a trace matches. Backends may filter beforehand."""
        step = number(tree.tags.get(self.kind.step_tag))
        if step is None or (self.steps is not None and step not in self.steps):
            return False
        if not all(fnmatchcase(tree.tags.get(key, ""), _literal(value)) for key, value in self.tags.items()):
            return False
        if self.span and not any(fnmatchcase(span.name, _literal(self.span)) for span in tree.spans()):
            return False
        return self._reward_matches(reward_of(tree))

    def _reward_matches(self, reward: float | None) -> bool:
        if self.reward_min is None and self.reward_max is None:
            return True
        low = -math.inf if self.reward_min is None else self.reward_min
        high = math.inf if self.reward_max is None else self.reward_max
        return reward is not None and low <= reward <= high


def _literal(pattern: str) -> str:
    """Escape fnmatch's special characters except `*`."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


class TraceStore(Protocol):
    """A backend to read traces from. Every method raises UserError if the backend does not answer."""

    def search(self, wanted: TraceFilter) -> Iterator[TraceTree]:
        """The matching traces, newest first, loaded page by page on demand."""
        ...

    def get(self, trace_ids: Sequence[str]) -> dict[str, TraceTree]:
        """The existing traces among these ids (32 hex digits each), by id."""
        ...

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        """At most `limit` ids (32 hex digits) with this prefix."""
        ...
