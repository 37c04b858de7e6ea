"""Resolves references to traces: an id, its first digits, or a name such as `s3/i17/n2`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from trackway.system.process import UserError
from trackway.traces.store import TraceFilter, TraceStore
from trackway.traces.tree import TraceTree
from trackway.wire.base import sample_index

_ID = re.compile(r"(?:tr-)?([0-9a-f]{6,32})")
_NAME = re.compile(r"(s|val)(\d+)/i(.+)/n(\d+)")
_SHOWN = 5
MOST_COMPARED = 16

T = TypeVar("T")


@dataclass(frozen=True)
class TrajectoryRef:
    """A trajectory by its tags."""

    step: int
    sample_index: int | str
    rollout_n: int
    validate: bool = False
    experiment_name: str | None = None

    @property
    def name(self) -> str:
        """The name shown in lists: `s3/i17/n2`, or `val3/i17/n2`."""
        return f"{'val' if self.validate else 's'}{self.step}/i{self.sample_index}/n{self.rollout_n}"

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the trajectory."""
        tags = {
            "step": str(self.step),
            "sample_index": str(self.sample_index),
            "rollout_n": str(self.rollout_n),
            "validate": str(self.validate),
        }
        return tags if self.experiment_name is None else {**tags, "experiment_name": self.experiment_name}


@dataclass(frozen=True)
class CompareOptions:
    """The options that select trajectories to compare."""

    sample_index: int | str | None = None
    steps: str | None = None
    """Steps of one rollout: `1,10` or `1-5`."""
    step: int | None = None
    rollouts: str | None = None
    """Rollouts of one group: `0,2` or `0-7`."""
    rollout_n: int = 0
    validate: bool = False

    def references(self, traces: Sequence[str]) -> list[str]:
        """The references, in the order given. Raises UserError unless the options select 2 to 16 trajectories."""
        by_place = self.steps is not None or self.rollouts is not None or self.step is not None
        if len(traces) > 1 and not by_place and self.sample_index is None:
            return _bounded([*traces])
        if not traces and self.sample_index is not None:
            if self.steps is not None and self.step is None and self.rollouts is None:
                return [self._place(step, self.rollout_n) for step in _numbers("--steps", self.steps)]
            if self.rollouts is not None and self.step is not None and self.steps is None:
                return [self._place(self.step, rollout_n) for rollout_n in _numbers("--rollouts", self.rollouts)]
        raise UserError(
            "expected two traces or more, or --sample-index 7 --steps 1,10, or --step 3 --sample-index 7 --rollouts 0-7"
        )

    def _place(self, step: int, rollout_n: int) -> str:
        return TrajectoryRef(step, _index(self.sample_index), rollout_n, self.validate).name


def _index(value: int | str | None) -> int | str:
    try:
        return sample_index(value)
    except ValueError as error:
        raise UserError(f"--sample-index: {error}") from error


def _numbers(option: str, text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"{option}: expected numbers such as 1,10 or 0-7, got {text!r}")
        numbers += range(int(first), min(int(last or first), int(first) + MOST_COMPARED) + 1)
    return _bounded(list(dict.fromkeys(numbers)))


def _bounded(found: list[T]) -> list[T]:
    if not 2 <= len(found) <= MOST_COMPARED:
        got = f"more than {MOST_COMPARED}" if len(found) > MOST_COMPARED else str(len(found))
        raise UserError(f"expected 2 to {MOST_COMPARED} trajectories to compare, got {got}; name others")
    return found


def resolve(store: TraceStore, ref: str, experiment_name: str | None = None) -> TraceTree:
    """The trace with this reference.

    Raises:
        UserError: the reference is malformed, unknown or ambiguous.
    """
    if match := _ID.fullmatch(ref.lower()):
        return _by_id(store, match[1])
    if match := _NAME.fullmatch(ref):
        kind, step, index, rollout_n = match.groups()
        return at(store, TrajectoryRef(int(step), _index(index), int(rollout_n), kind == "val", experiment_name))
    raise UserError(
        f"expected a trace id (tr-... or at least 6 of its hex digits) or a name such as s3/i17/n2 or val3/i17/n0, "
        f"got {ref!r}; `trackway traces list` shows both"
    )


def at(store: TraceStore, ref: TrajectoryRef) -> TraceTree:
    """The newest trace of a trajectory, since a resumed run repeats steps.

    Raises:
        UserError: there is none, or runs of several names have one.
    """
    trees = list(store.search(TraceFilter(tags=ref.tags)))
    runs = sorted({tree.tags.get("experiment_name", "") for tree in trees})
    if len(runs) > 1:
        raise UserError(f"{ref.name} exists in several runs: {', '.join(runs)}; add --run")
    if not trees:
        where = f" of run {ref.experiment_name!r}" if ref.experiment_name else ""
        raise UserError(f"no trace of {ref.name}{where}; `trackway traces list --step {ref.step}` shows what is there")
    return trees[0]


def _by_id(store: TraceStore, digits: str) -> TraceTree:
    ids = [digits] if len(digits) == 32 else store.ids_with_prefix(digits, _SHOWN + 1)
    if len(ids) > 1:
        shown = ", ".join(ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")
        raise UserError(f"{digits!r} begins several trace ids: {shown}; give more digits")
    trees = store.get(ids)
    if not trees:
        raise UserError(f"no trace whose id begins with {digits!r}; `trackway traces list` shows what is there")
    return trees[ids[0]]
