"""What becomes of each trajectory of a step: it moves the policy, or it is dropped for a reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trackway.trainer.learner.batch import LeftOut, left_out
from trackway.trainer.metrics.rollout import Metrics
from trackway.wire.trajectory import Trajectory


class TrainStatus(StrEnum):
    """The value is what the feedback on its trace says."""

    USED = "used"
    DROPPED_FAILED = "dropped_failed"
    """It ended with an error, or has nothing to learn from: no token of the model's own, or no score."""
    DROPPED_STALE = "dropped_stale"
    """Its oldest token comes from weights that are too far behind those being trained."""


@dataclass(frozen=True)
class FilteredBatch:
    """The trajectories of a step and the fate of each, in the same order."""

    trajectories: Sequence[Trajectory]
    fates: Sequence[TrainStatus]

    @property
    def used(self) -> list[Trajectory]:
        """Those that the learner gets."""
        return [one for one, fate in zip(self.trajectories, self.fates, strict=True) if fate is TrainStatus.USED]

    def count(self, fate: TrainStatus) -> int:
        """How many have this fate."""
        return self.fates.count(fate)

    def metrics(self) -> Metrics:
        """How many were dropped, why, and verl's share of the failed ones."""
        reasons = Counter(left_out(one) for one in self.trajectories)
        dropped = {fate: self.count(fate) for fate in (TrainStatus.DROPPED_FAILED, TrainStatus.DROPPED_STALE)}
        return {
            **{f"training/{fate}": float(count) for fate, count in dropped.items()},
            **{f"training/left_out/{reason}": float(reasons[reason]) for reason in LeftOut},
            "response/aborted_ratio": dropped[TrainStatus.DROPPED_FAILED] / len(self.fates),
        }


def filter_trajectories(trajectories: Sequence[Trajectory], version: int, max_staleness: int | None) -> FilteredBatch:
    """The fate of each trajectory when weights `version` are trained.

    `max_staleness` is verl's `max_off_policy_threshold` with its strategy `drop`: the most versions that the oldest
    token may be behind; None keeps all.
    """
    return FilteredBatch(trajectories, [_fate(one, version, max_staleness) for one in trajectories])


def _fate(one: Trajectory, version: int, max_staleness: int | None) -> TrainStatus:
    if left_out(one) is not None:
        return TrainStatus.DROPPED_FAILED
    oldest = min((span.version for span in one.weight_versions), default=version)
    stale = max_staleness is not None and version - oldest > max_staleness
    return TrainStatus.DROPPED_STALE if stale else TrainStatus.USED
