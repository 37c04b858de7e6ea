"""Client of the rollout service; generation asks by vLLM's route, so a plain vLLM server can stand in for it."""

import uuid

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.rollout import GenerateReply, GenerateRequest, WeightsReply


class RolloutClient(ServiceClient):
    """Token ids in, token ids and logprobs out; every method raises TrackwayError."""

    async def generate(
        self, request: GenerateRequest, session_id: str | None = None, deadline: Deadline | None = None
    ) -> GenerateReply:
        """Continue one prompt."""
        request_id = request.request_id or uuid.uuid4().hex  # vLLM takes no null here
        return await self.call(
            "POST",
            "/inference/v1/generate",
            reply=GenerateReply,
            body=request.model_copy(update={"request_id": request_id}),
            session_id=session_id,
            deadline=deadline,
        )

    async def weights(self) -> WeightsReply:
        """Which weights the replica that answers holds."""
        return await self.call("GET", "/weights", reply=WeightsReply)
