"""Which trajectories of a step are trained on, and why the others are not. Decided here, once per trajectory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trackway.trainer.metrics.rollout import Metrics
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import Trajectory

INFRASTRUCTURE = frozenset(
    {
        ErrorCode.INSTANCE_LOST,
        ErrorCode.WEIGHTS_BEHIND,
        ErrorCode.REQUEST_INCOMPLETE,
        ErrorCode.OVERLOADED,
        ErrorCode.PAUSED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.ENGINE_FAILED,
        ErrorCode.WEIGHTS_CORRUPT,
        ErrorCode.WEIGHTS_STALE,
        ErrorCode.DISK_FULL,
        ErrorCode.NOT_WRITABLE,
        ErrorCode.UNAVAILABLE,
    }
)
"""Errors of a service, a machine or the network; the others come from the row, the agent loop or a tool."""


class TrainStatus(StrEnum):
    """Whether a trajectory is trained on, or the first reason why not."""

    USED = "used"
    INFRASTRUCTURE = "infrastructure"
    """It failed with an error of INFRASTRUCTURE."""
    ERROR = "error"
    """It failed with another error."""
    NO_MODEL_TOKEN = "no_model_token"
    """The model wrote no token of the response."""
    UNSCORED = "unscored"
    STALE = "stale"
    """Its oldest token was sampled from weights that are too many versions behind."""

    @property
    def feedback(self) -> str:
        """The value of the feedback `fate` on the trajectory's trace, and its state in the account of rollouts."""
        return _FEEDBACK[self]


_FEEDBACK = {
    TrainStatus.USED: "used",
    TrainStatus.INFRASTRUCTURE: "dropped_infrastructure",
    TrainStatus.ERROR: "dropped_failed",
    TrainStatus.NO_MODEL_TOKEN: "dropped_filtered",
    TrainStatus.UNSCORED: "dropped_failed",
    TrainStatus.STALE: "dropped_stale",
}
_UNTRAINABLE = [status for status in TrainStatus if status not in (TrainStatus.USED, TrainStatus.STALE)]


@dataclass(frozen=True)
class FilteredBatch:
    """The trajectories of a step, and the status of each in the same order."""

    trajectories: Sequence[Trajectory]
    statuses: Sequence[TrainStatus]

    @property
    def used(self) -> list[Trajectory]:
        """The trajectories to train on, in their order."""
        pairs = zip(self.trajectories, self.statuses, strict=True)
        return [trajectory for trajectory, status in pairs if status is TrainStatus.USED]

    @property
    def counts(self) -> dict[str, int]:
        """How many trajectories get each value of the feedback `fate`."""
        counts = Counter(status.feedback for status in self.statuses)
        return {value: counts[value] for value in _FEEDBACK.values()}

    def metrics(self) -> Metrics:
        """How many trajectories were dropped, by reason, and verl's share of the failed ones."""
        untrainable = {reason: self.statuses.count(reason) for reason in _UNTRAINABLE}
        return {
            **{f"training/{value}": float(count) for value, count in self.counts.items() if value != "used"},
            **{f"training/left_out/{reason}": float(count) for reason, count in untrainable.items()},
            "response/aborted_ratio": sum(untrainable.values()) / len(self.statuses),
        }


def filter_trajectories(trajectories: Sequence[Trajectory], version: int, max_staleness: int | None) -> FilteredBatch:
    """The status of each trajectory when weights `version` are trained.

    `max_staleness` is verl's `max_off_policy_threshold` with its strategy `drop`: the most versions that the oldest
    token may be behind; None keeps all.
    """
    statuses = [train_status(trajectory, version, max_staleness) for trajectory in trajectories]
    return FilteredBatch(trajectories, statuses)


def train_status(trajectory: Trajectory, version: int, max_staleness: int | None) -> TrainStatus:
    """The status of one trajectory; arguments as in `filter_trajectories`."""
    if trajectory.error is not None:
        return TrainStatus.INFRASTRUCTURE if trajectory.error.code in INFRASTRUCTURE else TrainStatus.ERROR
    if not any(any(row.response_mask) for row in trajectory.rows):
        return TrainStatus.NO_MODEL_TOKEN
    if trajectory.reward is None:
        return TrainStatus.UNSCORED
    oldest = min((span.version for row in trajectory.rows for span in row.weight_versions), default=version)
    stale = max_staleness is not None and version - oldest > max_staleness
    return TrainStatus.STALE if stale else TrainStatus.USED
