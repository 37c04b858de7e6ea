"""Feedback on traces: reward, advantage and training status, which only the trainer knows, and the ground truth.

Feedback is queued on disk (feedback_queue.py) and sent in the background, by another process if necessary. MLflow
accepts it only once the trace has arrived, a second or two after the trajectory ended; Weave accepts it at any time.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.trainer.delivery.feedback_queue import GROUND_TRUTH, Assessment, Value
from trackway.wire.base import named_number
from trackway.wire.trajectory import MAX_ANSWER, Trajectory


class TraceFeedback(Protocol):
    """A trace backend that stores feedback."""

    def submit(self, assessments: Sequence[Assessment]) -> None:
        """Queue the values on disk. Never raises."""
        ...


def training_feedback(batch: FilteredBatch, advantages: Sequence[float], step: int = 0) -> list[Assessment]:
    """Reward, advantage, `fate` and ground truth of the traced trajectories. `advantages` belong to `batch.used`.

    Those that step `step` trained and an earlier one submitted have `trained_step` too. 0 leaves it out.
    """
    remaining = iter(advantages)
    by_position = [next(remaining) if status is TrainStatus.USED else None for status in batch.statuses]
    return [
        _assessment(
            trajectory,
            {
                **_reward(trajectory),
                **_named("advantage", advantage),
                "fate": status.feedback,
                **_named("trained_step", float(step) if step > trajectory.tags.step else None),
                **_ground_truth(trajectory),
            },
        )
        for trajectory, status, advantage in zip(batch.trajectories, batch.statuses, by_position, strict=True)
        if trajectory.trace_id is not None
    ]


def validation_feedback(trajectories: Sequence[Trajectory]) -> list[Assessment]:
    """Reward and ground truth of each trajectory that has a trace and a reward."""
    scored = [trajectory for trajectory in trajectories if trajectory.trace_id is not None and trajectory.reward]
    return [_assessment(trajectory, _reward(trajectory) | _ground_truth(trajectory)) for trajectory in scored]


def links_of(trajectories: Sequence[Trajectory]) -> list[Assessment]:
    """The link of each trajectory's trace to the run."""
    return [
        Assessment(trajectory.trace_id, trajectory.span_id or "", {}, link=True)
        for trajectory in trajectories
        if trajectory.trace_id is not None
    ]


def _assessment(trajectory: Trajectory, values: Mapping[str, Value]) -> Assessment:
    named = {name: named_number(value) if isinstance(value, float) else value for name, value in values.items()}
    return Assessment(trajectory.trace_id or "", trajectory.span_id or "", named)


def _reward(trajectory: Trajectory) -> dict[str, float]:
    return _named("reward", None if trajectory.reward is None else trajectory.reward.score)


def _ground_truth(trajectory: Trajectory) -> dict[str, str]:
    """Empty for none, and for one longer than an answer: a part of it would be another truth."""
    truth = trajectory.ground_truth
    return {} if truth is None or len(truth) > MAX_ANSWER else {GROUND_TRUTH: truth}


def _named(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
