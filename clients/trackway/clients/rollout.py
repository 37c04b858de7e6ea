"""Client of the rollout service. Generation uses vLLM's route, so a plain vLLM server can replace the service."""

import uuid
from collections.abc import Sequence
from functools import cached_property

from trackway.clients.base import ServiceClient
from trackway.clients.batches import Batches
from trackway.clients.deadline import Deadline
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import (
    GenerateReply,
    GenerateRequest,
    MemoryPart,
    PauseMode,
    SleepReplies,
    SleepReply,
    WeightsReply,
)


class RolloutClient(ServiceClient):
    """Token ids in, token ids and logprobs out; every method raises TrackwayError."""

    @cached_property
    def _generations(self) -> Batches[GenerateRequest, GenerateReply] | None:
        return self._batches("/generate_batch", GenerateRequest, GenerateReply, _prompt_tokens)

    async def generate(
        self, request: GenerateRequest, session_id: str | None = None, deadline: Deadline | None = None
    ) -> GenerateReply:
        """Continue one prompt."""
        deadline = deadline or Deadline.after(self.policy.total_s)
        if request.request_id is None:  # vLLM takes no null here
            request = request.model_copy(update={"request_id": uuid.uuid4().hex})
        if self._generations is not None and session_id is not None:
            reply = await self._generations.call(request, session_id, deadline)
            if reply is not None:
                return reply
        return await self.call(
            "POST",
            "/inference/v1/generate",
            reply=GenerateReply,
            body=request,
            session_id=session_id,
            deadline=deadline,
        )

    async def weights(self) -> WeightsReply:
        """The weight version of the replica that answers."""
        return await self.call("GET", "/weights", reply=WeightsReply)

    async def sleeping(self, deadline: Deadline | None = None) -> SleepReplies:
        """Which replicas can release memory, and which parts they have released."""
        return await self._each("GET", "/is_sleeping", deadline)

    async def sleep(self, mode: PauseMode = "wait", deadline: Deadline | None = None) -> SleepReplies:
        """Pause every replica and release its memory; the error names those that did not."""
        return await self._each("POST", f"/sleep?mode={mode}", deadline)

    async def wake_up(
        self, parts: Sequence[MemoryPart] = (), min_weight_version: int = 0, deadline: Deadline | None = None
    ) -> SleepReplies:
        """Reallocate these parts of every replica's memory (default all), and load at least this weight version."""
        tags = "".join(f"&tags={part}" for part in parts)
        return await self._each("POST", f"/wake_up?min_weight_version={min_weight_version}{tags}", deadline)

    async def _each(self, method: str, path: str, deadline: Deadline | None) -> SleepReplies:
        """The answers of all replicas behind the URL; a service without Ray Serve is a single replica."""
        try:
            return await self.call(method, f"/replicas{path}", reply=SleepReplies, deadline=deadline)
        except TrackwayError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
        return SleepReplies(replicas=[await self.call(method, path, reply=SleepReply, deadline=deadline)])


def _prompt_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids)
