"""What the trainer knows about a trajectory and its trace does not: reward, advantage, and what became of it.

It waits on disk (feedback_queue.py) and is sent in the background, by another process if need be. MLflow takes feedback
only for a trace that has arrived, a second or two after the trajectory ended; Weave takes it at any time.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from trackway.trainer.delivery.assessment import Assessment, Value
from trackway.trainer.learner.filtering import FilteredBatch, TrainStatus
from trackway.wire.base import named_number
from trackway.wire.trajectory import Trajectory


class TraceFeedback(Protocol):
    """A trace backend that keeps feedback."""

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Put the values on disk, to be sent; never raises."""
        ...


def training_feedback(step: FilteredBatch, advantages: Sequence[float]) -> list[Assessment]:
    """Reward, advantage and fate of the trajectories that have a trace; `advantages` are those of `step.used`."""
    left = iter(advantages)
    by_place = [next(left) if fate is TrainStatus.USED else None for fate in step.fates]
    return [
        _assessment(one, {**_reward(one), **_named("advantage", advantage), "fate": fate.value})
        for one, fate, advantage in zip(step.trajectories, step.fates, by_place, strict=True)
        if one.trace_id is not None
    ]


def validation_feedback(trajectories: Sequence[Trajectory]) -> list[Assessment]:
    """The reward of those that have a trace and a reward."""
    return [_assessment(one, _reward(one)) for one in trajectories if one.trace_id is not None and one.reward]


def _assessment(one: Trajectory, values: Mapping[str, Value]) -> Assessment:
    named = {name: named_number(value) if isinstance(value, float) else value for name, value in values.items()}
    return Assessment(one.trace_id or "", one.span_id or "", named)


def _reward(one: Trajectory) -> dict[str, float]:
    return _named("reward", None if one.reward is None else one.reward.score)


def _named(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
