"""Client of the reward service."""

from functools import cached_property

from trackway.clients.base import ServiceClient
from trackway.clients.batches import Batches
from trackway.clients.retry import Deadline
from trackway.wire.reward import ScoreRequest, ScorerInfo, ScorerList
from trackway.wire.trajectory import Reward


class RewardClient(ServiceClient):
    """Scores solutions. Every method raises TrackwayError."""

    service = "reward"

    @cached_property
    def _scores(self) -> Batches[ScoreRequest, Reward] | None:
        return self._batches("/score_batch", ScoreRequest, Reward, _characters)

    async def score(
        self, request: ScoreRequest, session_id: str | None = None, deadline: Deadline | None = None
    ) -> Reward:
        """Score one solution."""
        deadline = deadline or Deadline.after(self.policy.total_s)
        if self._scores is not None and session_id is not None:
            reward = await self._scores.call(request, session_id, deadline)
            if reward is not None:
                return reward
        return await self.call("POST", "/score", reply=Reward, body=request, session_id=session_id, deadline=deadline)

    async def scorers(self) -> list[ScorerInfo]:
        """Every scorer, its data sources and methods."""
        return (await self.call("GET", "/scorers", reply=ScorerList)).scorers


def _characters(request: ScoreRequest) -> int:
    return len(request.solution_str)
