"""Resolves references to traces: an id, its first digits, or a name such as `s3/i17/n2`."""

import re
from dataclasses import dataclass

from trackway.system.user_error import UserError
from trackway.traces.store import TraceFilter, TraceStore
from trackway.traces.tree import TraceTree
from trackway.wire.sample_index import sample_index

_ID = re.compile(r"(?:tr-)?([0-9a-f]{6,32})")
_NAME = re.compile(r"(s|val)(\d+)/i(.+)/n(\d+)")
_SHOWN = 5


@dataclass(frozen=True)
class Place:
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
class Choice:
    """The options that select two trajectories to compare."""

    sample_index: int | str | None = None
    steps: str | None = None
    """Two steps: `1,10`."""
    step: int | None = None
    rollouts: str | None = None
    """Two rollouts of one group: `0,2`."""
    rollout_n: int = 0
    validate: bool = False

    def pair(self, a: str | None, b: str | None) -> tuple[str, str]:
        """The two references. Raises UserError unless the options select exactly two trajectories."""
        by_place = self.steps is not None or self.rollouts is not None or self.step is not None
        if a is not None and b is not None and not by_place and self.sample_index is None:
            return a, b
        if a is None and b is None and self.sample_index is not None:
            if self.steps is not None and self.step is None and self.rollouts is None:
                first, second = _two("--steps", self.steps)
                return self._place(first, self.rollout_n), self._place(second, self.rollout_n)
            if self.rollouts is not None and self.step is not None and self.steps is None:
                first, second = _two("--rollouts", self.rollouts)
                return self._place(self.step, first), self._place(self.step, second)
        raise UserError(
            "expected two traces (A B), or --sample-index 7 --steps 1,10, or --step 3 --sample-index 7 --rollouts 0,2"
        )

    def _place(self, step: int, rollout_n: int) -> str:
        return Place(step, _index(self.sample_index), rollout_n, self.validate).name


def _index(value: int | str | None) -> int | str:
    try:
        return sample_index(value)
    except ValueError as error:
        raise UserError(f"--sample-index: {error}") from error


def _two(option: str, text: str) -> tuple[int, int]:
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise UserError(f"{option}: expected two numbers such as 1,10, got {text!r}")
    return int(numbers[0]), int(numbers[1])


def resolve(store: TraceStore, ref: str, experiment_name: str | None = None) -> TraceTree:
    """The trace with this reference.

    Raises:
        UserError: the reference is malformed, unknown or ambiguous.
    """
    if match := _ID.fullmatch(ref.lower()):
        return _by_id(store, match[1])
    if match := _NAME.fullmatch(ref):
        kind, step, index, rollout_n = match.groups()
        place = Place(int(step), _index(index), int(rollout_n), kind == "val", experiment_name)
        return at(store, place)
    raise UserError(
        f"expected a trace id (tr-... or at least 6 of its hex digits) or a name such as s3/i17/n2 or val3/i17/n0, "
        f"got {ref!r}; `trackway traces list` shows both"
    )


def at(store: TraceStore, place: Place) -> TraceTree:
    """The newest trace of a trajectory, since a resumed run repeats steps.

    Raises:
        UserError: there is none, or runs of several names have one.
    """
    trees = list(store.search(TraceFilter(tags=place.tags)))
    runs = sorted({tree.tags.get("experiment_name", "") for tree in trees})
    if len(runs) > 1:
        raise UserError(f"{place.name} exists in several runs: {', '.join(runs)}; add --experiment-name")
    if not trees:
        where = f" of run {place.experiment_name!r}" if place.experiment_name else ""
        raise UserError(
            f"no trace of {place.name}{where}; `trackway traces list --step {place.step}` shows what is there"
        )
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
