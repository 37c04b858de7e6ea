"""The scorer of another process: a reward service that `functions_file` names."""

from trackway.clients import CallPolicy, RewardClient
from trackway.serving.own_code import FunctionServer, FunctionsOutage
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward


class RemoteScorer:
    """Asks the reward function of another process for each score."""

    def __init__(self, server: FunctionServer, timeout_s: float) -> None:
        self.info = ScorerInfo(
            name="function",
            data_sources=[ANY_DATA_SOURCE],
            methods=["default"],
            description=f"the reward function of {server.process}",
        )
        self._outage = FunctionsOutage(server.process)
        policy = CallPolicy(read_s=timeout_s, total_s=timeout_s, attempts=1)
        self._client = RewardClient(f"{server.url}/reward", token=server.token, policy=policy)

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """Score one solution. UNAVAILABLE names the process if it does not answer."""
        try:
            reward = await self._client.score(request)
        except TrackwayError as error:
            if error.code is not ErrorCode.UNAVAILABLE:
                raise
            raise self._outage.error(error) from error
        self._outage.began = None
        return reward
