"""The protocol of scorers."""

from typing import Protocol, runtime_checkable

from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward


@runtime_checkable
class Scorer(Protocol):
    """Scores solutions for certain data sources."""

    @property
    def info(self) -> ScorerInfo:
        """Name, data sources and methods. The first method is the default."""
        ...

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """Score one solution with a method. Raises TrackwayError for an invalid request."""
        ...
