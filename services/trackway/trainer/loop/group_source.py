"""Source of a run's groups: rollouts of its rows, or sessions of a deployed agent."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from trackway.learner.measuring import ActiveTime
from trackway.system.waits import Waits
from trackway.wire.agent import Sample
from trackway.wire.trajectory import Trajectory


class GroupSource(ABC):
    """Makes, or waits for, the rollouts of one group."""

    def __init__(self, active: ActiveTime | None = None) -> None:
        self.active = active or ActiveTime()
        """The time in which groups were requested. One object for all rollouts of a run."""
        self.waits = Waits()
        """The groups that are requested."""
        self.retries = 0
        """Rollouts that were requested again."""

    @property
    @abstractmethod
    def n(self) -> int:
        """Rollouts of each group."""

    @abstractmethod
    async def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> list[Trajectory]:
        """All n rollouts of one sample, in order. A failed rollout has its `error` set."""

    def take_stale(self) -> list[Trajectory]:
        """Rollouts that became too old before they were part of a group, since the last call."""
        return []

    def drawn(self) -> Sequence[str]:
        """Groups that cannot be drawn again; part of a checkpoint."""
        return ()

    def saved(self, drawn: Collection[str]) -> None:
        """A checkpoint with `drawn` is complete."""
        del drawn
