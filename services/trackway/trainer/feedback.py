"""What the trainer knows about a trajectory and its trace does not: reward, advantage, and what became of it.

All of it happens in the background. MLflow takes feedback only for a trace that has arrived, a second or two after the
trajectory ended, so it is tried again until its patience ends; Weave takes it at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trackway.trainer.fate import Fate, Sorted
from trackway.wire.trajectory import Trajectory

Value = float | str


@dataclass(frozen=True)
class Assessment:
    """Values by name for the trace of one trajectory."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits: its root span."""
    values: Mapping[str, Value]


class TraceFeedback(Protocol):
    """A trace backend that keeps feedback."""

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Queue the values; returns at once and never raises."""
        ...

    def close(self) -> None:
        """Let go of connections, when nothing is queued any more."""
        ...


def training_feedback(step: Sorted, advantages: Sequence[float]) -> list[Assessment]:
    """Reward, advantage and fate of the trajectories that have a trace; `advantages` are those of `step.used`."""
    left = iter(advantages)
    by_place = [next(left) if fate is Fate.USED else None for fate in step.fates]
    return [
        _assessment(one, {**_reward(one), **_named("advantage", advantage), "fate": fate.value})
        for one, fate, advantage in zip(step.trajectories, step.fates, by_place, strict=True)
        if one.trace_id is not None
    ]


def validation_feedback(trajectories: Sequence[Trajectory]) -> list[Assessment]:
    """The reward of those that have a trace and a reward."""
    return [_assessment(one, _reward(one)) for one in trajectories if one.trace_id is not None and one.reward]


def _assessment(one: Trajectory, values: Mapping[str, Value]) -> Assessment:
    return Assessment(one.trace_id or "", one.span_id or "", values)


def _reward(one: Trajectory) -> dict[str, float]:
    return _named("reward", None if one.reward is None else one.reward.score)


def _named(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
