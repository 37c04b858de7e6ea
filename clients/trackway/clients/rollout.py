"""Client of the rollout service. Generation uses vLLM's route, so a plain vLLM server can replace the service."""

import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from urllib.parse import urlencode

from pydantic import ValidationError

from trackway.clients.base import ServiceClient
from trackway.clients.batches import Batches
from trackway.clients.direct import TrajectoryRouting
from trackway.clients.retry import Deadline, incident_of, reason_of
from trackway.system.waits import note_problem
from trackway.tracing import add_incident, current_trace_stats
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.rollout import (
    EngineLoad,
    EngineLoads,
    GeneratePiece,
    GenerateReply,
    GenerateRequest,
    MemoryPart,
    PolicyList,
    SleepMode,
    SleepReplies,
    SleepReply,
    WeightsReply,
)

_STREAM = "/generate_stream"
_NO_SUCH_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.INVALID_REQUEST)
"""Errors of a server without streams, such as a plain vLLM."""


class RolloutClient(ServiceClient):
    """Token ids in, token ids and logprobs out. Every method raises TrackwayError."""

    service = "rollout"
    routing: TrajectoryRouting | None = None
    """Chooses the replica of each trajectory when calls go to replicas directly. Without it the session does."""

    @cached_property
    def _generations(self) -> Batches[GenerateRequest, GenerateReply] | None:
        return self._batches("/generate_batch", GenerateRequest, GenerateReply, _prompt_tokens)

    async def generate(
        self,
        request: GenerateRequest,
        session_id: str | None = None,
        deadline: Deadline | None = None,
        *,
        trajectory: str | None = None,
        alone: bool = False,
    ) -> GenerateReply:
        """Continue one prompt. `alone` sends it in no batch, as calls that do not come together.

        `trajectory` stays on its replica until `release`.
        """
        deadline = deadline or Deadline.after(self.policy.total_s)
        if request.request_id is None:  # vLLM takes no null here
            request = request.model_copy(update={"request_id": uuid.uuid4().hex})
        replica = await self._replica(request, session_id, trajectory)
        if self._generations is not None and session_id is not None and not alone:
            reply = await self._generations.call(request, session_id, deadline, replica)
            if reply is not None:
                return reply
        return await self.call(
            "POST",
            "/inference/v1/generate",
            reply=GenerateReply,
            body=request,
            session_id=session_id,
            deadline=deadline,
            replica=replica,
        )

    @property
    def moved(self) -> int:
        """Turns on another replica than their trajectory's turn before, since the start."""
        return self.routing.moved if self.routing is not None else 0

    def release(self, trajectory: str) -> None:
        """Say that a trajectory has ended, so that its replica counts as having one fewer."""
        if self.routing is not None:
            self.routing.release(trajectory)

    async def _replica(self, request: GenerateRequest, session_id: str | None, trajectory: str | None) -> str | None:
        """The replica that the routing chooses. None without routing, and when only the proxy can be reached."""
        if self.routing is None or self._routes is None or session_id is None or trajectory is None:
            return None
        listed = [address.replica for address in await self._routes.addresses(session_id, None)]
        return self.routing.place(trajectory, session_id, len(request.token_ids), listed) if listed else None

    async def stream_generation(
        self,
        request: GenerateRequest,
        session_id: str | None = None,
        deadline: Deadline | None = None,
        *,
        trajectory: str | None = None,
    ) -> AsyncGenerator[GeneratePiece]:
        """Stream `generate` as the tokens come. Closing the iterator aborts the generation.

        A stream that breaks after its first token ends with the reason `abort`. One that gave none is replaced by
        `generate`, with its retries, and so is that of a server without this route, such as a plain vLLM.
        """
        deadline = deadline or Deadline.after(self.policy.total_s)
        if request.request_id is None:
            request = request.model_copy(update={"request_id": uuid.uuid4().hex})
        count, ended = 0, False
        replica = await self._replica(request, session_id, trajectory)
        try:
            async with self.stream(
                "POST", _STREAM, body=request, session_id=session_id, deadline=deadline, replica=replica
            ) as lines:
                async for line in lines:
                    piece = GeneratePiece.model_validate_json(line)
                    _take(piece)
                    ended = ended or piece.finish_reason is not None
                    count += len(piece.token_ids)
                    if piece.token_ids or piece.finish_reason is not None or piece.prompt_logprobs is not None:
                        yield piece
        except (TrackwayError, ValidationError) as error:
            if not ended and isinstance(error, TrackwayError) and _is_final(error, bool(count)):
                raise
            note_problem(reason_of(error))
            url, reason = self.base_url + _STREAM, reason_of(error)
            add_incident(incident_of(error), called=self.called, url=url, attempt=1, reason=reason)
        if ended:
            return
        if count:
            yield GeneratePiece(finish_reason="abort")
            return
        reply = await self.generate(request, session_id, deadline, trajectory=trajectory)
        [choice] = reply.choices
        logprobs = choice.token_logprobs
        tops = choice.top_logprobs if request.sampling_params.logprobs else []
        for span in choice.weight_versions:
            part = slice(span.start, span.end)
            yield GeneratePiece(
                token_ids=choice.token_ids[part],
                logprobs=logprobs[part],
                top_logprobs=tops[part],
                version=span.version,
                weight_versions=[span.moved(-span.start)],
            )
        yield GeneratePiece(finish_reason=choice.finish_reason, prompt_logprobs=reply.prompt_logprobs)

    async def weights(self) -> WeightsReply:
        """The weight version of the replica that answers."""
        return await self.call("GET", "/weights", reply=WeightsReply)

    async def loads(self, caller: str, deadline: Deadline | None = None) -> list[EngineLoad]:
        """The load of every replica's engine. `caller` counts as one of those that share them."""
        path = f"/load?{urlencode({'caller': caller})}"
        try:
            return (await self.call("GET", f"/replicas{path}", reply=EngineLoads, deadline=deadline)).replicas
        except TrackwayError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
        return [await self.call("GET", path, reply=EngineLoad, deadline=deadline)]

    async def policies(self) -> PolicyList:
        """Every policy that a request can name."""
        return await self.call("GET", "/policies", reply=PolicyList)

    async def sleeping(self, deadline: Deadline | None = None) -> SleepReplies:
        """Return which replicas can release memory, and which parts they have released."""
        return await self._each("GET", "/is_sleeping", deadline)

    async def sleep(self, mode: SleepMode = "wait", deadline: Deadline | None = None) -> SleepReplies:
        """Pause every replica and release its memory. The error names those that did not."""
        return await self._each("POST", f"/sleep?mode={mode}", deadline)

    async def wake_up(
        self, parts: Sequence[MemoryPart] = (), min_weight_version: int = 0, deadline: Deadline | None = None
    ) -> SleepReplies:
        """Reallocate these parts of every replica's memory (default all), and load at least this weight version."""
        tags = "".join(f"&tags={part}" for part in parts)
        return await self._each("POST", f"/wake_up?min_weight_version={min_weight_version}{tags}", deadline)

    async def _each(self, method: str, path: str, deadline: Deadline | None) -> SleepReplies:
        """The answers of all replicas behind the URL. A service without Ray Serve is a single replica."""
        try:
            return await self.call(method, f"/replicas{path}", reply=SleepReplies, deadline=deadline)
        except TrackwayError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
        return SleepReplies(replicas=[await self.call(method, path, reply=SleepReply, deadline=deadline)])


def _is_final(error: TrackwayError, begun: bool) -> bool:
    """Return whether neither the same generation as a whole nor the rest of it can succeed."""
    return not error.retryable and (begun or error.code not in _NO_SUCH_ROUTE)


def _take(piece: GeneratePiece) -> None:
    """Add the receipt of a piece to the current trace stats, and raise its error."""
    stats = current_trace_stats()
    if stats is not None and piece.receipt:
        stats.add_receipt(piece.receipt)
    if piece.error is not None:
        raise TrackwayError.from_reply(ErrorReply(error=piece.error))


def _prompt_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids)
