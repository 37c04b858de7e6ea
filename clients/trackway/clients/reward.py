"""Client of the reward service."""

from collections.abc import Sequence

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.reward import BatchScore, BatchScoreRequest, ScoreRequest, ScorerInfo, ScorerList
from trackway.wire.trajectory import Reward


class RewardClient(ServiceClient):
    """Scores solutions; every method raises TrackwayError."""

    async def score(
        self, request: ScoreRequest, session_id: str | None = None, deadline: Deadline | None = None
    ) -> Reward:
        """Score one solution."""
        return await self.call("POST", "/score", reply=Reward, body=request, session_id=session_id, deadline=deadline)

    async def score_batch(self, requests: Sequence[ScoreRequest], deadline: Deadline | None = None) -> list[Reward]:
        """Score several solutions; the rewards keep the order of the requests."""
        body = BatchScoreRequest(requests=list(requests))
        return (await self.call("POST", "/score/batch", reply=BatchScore, body=body, deadline=deadline)).rewards

    async def scorers(self) -> list[ScorerInfo]:
        """Every scorer, its data sources and methods."""
        return (await self.call("GET", "/scorers", reply=ScorerList)).scorers
