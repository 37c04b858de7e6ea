"""Batches of generations: those that a session's callers request at the same moment go in one HTTP request.

The trajectories of a group begin together, so their first turns cost one request instead of n. Each generation keeps
its own seed, trace and outcome. One that gets no answer in the batch is requested again on its own, with retries.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from pydantic import ValidationError

from trackway.clients.deadline import Deadline
from trackway.clients.failures import incident_of, reason_of
from trackway.tracing import add_incident, current_trace_stats, inject
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.rollout import MAX_BATCH, BatchEntry, BatchRequest, BatchResult, GenerateReply, GenerateRequest

MAX_BATCH_TOKENS = 65_536
"""Most prompt tokens in one request."""
_NO_SUCH_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.INVALID_REQUEST)
"""Errors of a server without batches, such as a plain vLLM."""

OpenBatch = Callable[[BatchRequest, str, Deadline], AbstractAsyncContextManager[AsyncIterator[str]]]
"""Sends a batch of a session before a deadline; the lines of its answer. Raises TrackwayError."""


@dataclass(eq=False)
class _Waiting:
    """A generation, and where its result goes: None if it has to be requested alone."""

    entry: BatchEntry
    deadline: Deadline
    result: "asyncio.Future[BatchResult | Exception | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class GenerationBatches:
    """Collects the generations that are requested for a session in one iteration of the event loop."""

    def __init__(self, open_batch: OpenBatch, url: str) -> None:
        self._open_batch = open_batch
        self._url = url
        self._waiting: dict[str, list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._supported = True

    async def generate(self, request: GenerateRequest, session_id: str, deadline: Deadline) -> GenerateReply | None:
        """The reply; None if the generation has to be requested alone.

        Raises:
            TrackwayError: an error that a retry cannot change; `deadline_exceeded`.
        """
        if not self._supported or len(request.token_ids) > MAX_BATCH_TOKENS:
            return None
        trace: dict[str, str] = {}
        inject(trace)
        waiting = _Waiting(BatchEntry.model_construct(request=request, trace=trace), deadline)
        together = self._waiting.setdefault(session_id, [])
        together.append(waiting)
        if len(together) == 1:
            asyncio.get_running_loop().call_soon(self._start, session_id)
        try:
            async with asyncio.timeout(deadline.remaining):
                result = await waiting.result
        except TimeoutError as error:
            message = f"POST {self._url}: no answer before the deadline; allow more time or look at /ready"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        return self._reply(result)

    def _reply(self, result: BatchResult | Exception | None) -> GenerateReply | None:
        if isinstance(result, BatchResult):
            stats = current_trace_stats()
            if stats is not None:
                stats.add_receipt(result.receipt)
            if result.error is None:
                return result.reply
            error = TrackwayError.from_reply(ErrorReply(error=result.error))
            if not error.retryable:
                raise error
            result = error
        if result is not None:
            add_incident(incident_of(result), url=self._url, attempt=1, reason=reason_of(result))
        return None

    def _start(self, session_id: str) -> None:
        """Send what has been collected, unless it is a single generation or has been cancelled."""
        together = [waiting for waiting in self._waiting.pop(session_id) if not waiting.result.done()]
        for batch in _batches(together):
            if len(batch) == 1:
                batch[0].result.set_result(None)
                continue
            # An empty context: the request belongs to the traces of all its entries.
            task = asyncio.create_task(self._send(batch, session_id), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for waiting in batch:
                waiting.result.add_done_callback(lambda _, batch=batch, task=task: _cancel_if_unwanted(batch, task))

    async def _send(self, batch: list[_Waiting], session_id: str) -> None:
        request = BatchRequest.model_construct(entries=[waiting.entry for waiting in batch])
        deadline = max((waiting.deadline for waiting in batch), key=lambda deadline: deadline.at)
        failure: Exception | None = None
        try:
            async with self._open_batch(request, session_id, deadline) as lines:
                async for line in lines:
                    result = BatchResult.model_validate_json(line)
                    if not batch[result.index].result.done():
                        batch[result.index].result.set_result(result)
        except (TrackwayError, ValidationError, IndexError) as error:
            self._supported = not (isinstance(error, TrackwayError) and error.code in _NO_SUCH_ROUTE)
            cause = error.__cause__
            failure = (cause if isinstance(cause, Exception) else error) if self._supported else None
        finally:
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_result(failure)


def _batches(together: list[_Waiting]) -> list[list[_Waiting]]:
    """Parts of at most MAX_BATCH generations and MAX_BATCH_TOKENS prompt tokens."""
    parts: list[list[_Waiting]] = []
    tokens = 0
    for waiting in together:
        size = len(waiting.entry.request.token_ids)
        if not parts or len(parts[-1]) == MAX_BATCH or tokens + size > MAX_BATCH_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(waiting)
        tokens += size
    return parts


def _cancel_if_unwanted(batch: list[_Waiting], task: asyncio.Task[None]) -> None:
    """Close the request when every caller has given up."""
    if all(waiting.result.cancelled() for waiting in batch):
        task.cancel()
