"""Client of the reward service."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

import httpx
from pydantic import SecretStr

from trackway.clients.base import CallPolicy, ServiceClient
from trackway.clients.batches import Batches
from trackway.clients.deadline import Deadline
from trackway.wire.batch import BatchRequest
from trackway.wire.reward import BatchScore, BatchScoreRequest, ScoreRequest, ScorerInfo, ScorerList
from trackway.wire.trajectory import Reward

_BATCH = "/score_batch"


class RewardClient(ServiceClient):
    """Scores solutions; every method raises TrackwayError.

    batches: send the scores that are requested for a session at the same moment in one request.
    """

    def __init__(
        self,
        base_url: str,
        http: httpx.AsyncClient | None = None,
        policy: CallPolicy | None = None,
        token: SecretStr | None = None,
        direct: bool = False,
        batches: bool = False,
    ) -> None:
        super().__init__(base_url, http, policy, token, direct)
        self._batches = (
            Batches(self._open_batch, self.base_url + _BATCH, ScoreRequest, Reward, _characters) if batches else None
        )

    async def score(
        self, request: ScoreRequest, session_id: str | None = None, deadline: Deadline | None = None
    ) -> Reward:
        """Score one solution."""
        deadline = deadline or Deadline.after(self.policy.total_s)
        if self._batches is not None and session_id is not None:
            reward = await self._batches.call(request, session_id, deadline)
            if reward is not None:
                return reward
        return await self.call("POST", "/score", reply=Reward, body=request, session_id=session_id, deadline=deadline)

    async def score_batch(self, requests: Sequence[ScoreRequest], deadline: Deadline | None = None) -> list[Reward]:
        """Score several solutions; the rewards keep the order of the requests."""
        body = BatchScoreRequest(requests=list(requests))
        return (await self.call("POST", "/score/batch", reply=BatchScore, body=body, deadline=deadline)).rewards

    async def scorers(self) -> list[ScorerInfo]:
        """Every scorer, its data sources and methods."""
        return (await self.call("GET", "/scorers", reply=ScorerList)).scorers

    def _open_batch(
        self, batch: BatchRequest[ScoreRequest], session_id: str, deadline: Deadline
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        return self.stream("POST", _BATCH, body=batch, session_id=session_id, deadline=deadline)


def _characters(request: ScoreRequest) -> int:
    return len(request.solution_str)
