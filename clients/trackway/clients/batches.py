"""Batches of calls: those that a group's trajectories make at the same moment go in one HTTP request.

The trajectories of a group begin together, so their first turns cost one request instead of n; so do later calls of
trajectories that stay side by side. No call waits for another: the batch is sent in the next iteration of the event
loop, and each result comes as soon as it is there. A call that gets no answer in the batch is made again on its own,
with retries.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic

from pydantic import ValidationError

from trackway.clients.retry import Deadline, incident_of, reason_of
from trackway.system.waits import Waiting, note_problem, noted_in, waits_of_call
from trackway.tracing import add_incident, current_trace_stats, inject
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.service import MAX_BATCH, BatchEntry, BatchRequest, BatchResult, ReplyT, RequestT

MAX_BATCH_SIZE = 65_536
"""Largest sum of the sizes of a batch's requests."""
_NO_SUCH_ROUTE = (ErrorCode.NOT_FOUND, ErrorCode.INVALID_REQUEST)
"""Errors of a server without batches, such as a plain vLLM."""


_Lines = AbstractAsyncContextManager[AsyncIterator[str]]


@dataclass(eq=False)
class _Waiting(Generic[RequestT, ReplyT]):
    """A request, and where its result goes: None if it has to be sent alone."""

    request: RequestT
    deadline: Deadline
    size: int
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    waits: tuple[Waiting, ...] = field(default_factory=waits_of_call)
    result: "asyncio.Future[BatchResult[ReplyT] | Exception | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Batches(Generic[RequestT, ReplyT]):
    """Collects the calls of a group that are made in one iteration of the event loop.

    open_batch: sends a batch of a group before a deadline, to a replica or any, and returns the lines of its answer.
        Raises TrackwayError.
    url: of the route, for messages.
    called: the service.
    request, reply: types of the request and of its reply.
    size: size of a request, in tokens or characters.
    """

    def __init__(
        self,
        open_batch: "Callable[[BatchRequest[RequestT], str, Deadline, str | None], _Lines]",
        url: str,
        called: str,
        request: type[RequestT],
        reply: type[ReplyT],
        size: Callable[[RequestT], int],
    ) -> None:
        self._open_batch = open_batch
        self._url = url
        self._called = called
        self._batch_type, self._entry_type, self._result_type = (
            BatchRequest[request],
            BatchEntry[request],
            BatchResult[reply],
        )
        self._size = size
        self._waiting: dict[tuple[str, str | None], list[_Waiting[RequestT, ReplyT]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._supported = True

    async def call(
        self, request: RequestT, group: str, deadline: Deadline, replica: str | None = None
    ) -> ReplyT | None:
        """The reply, or None if the request has to be sent alone. A batch has requests for one replica.

        Raises:
            TrackwayError: an error that a retry cannot change; `deadline_exceeded`.
        """
        size = self._size(request)
        if not self._supported or size > MAX_BATCH_SIZE:
            return None
        waiting = _Waiting[RequestT, ReplyT](request, deadline, size)
        together = self._waiting.setdefault((group, replica), [])
        together.append(waiting)
        if len(together) == 1:
            asyncio.get_running_loop().call_soon(self._start, group, replica)
        try:
            async with asyncio.timeout(deadline.remaining):
                result = await waiting.result
        except TimeoutError as error:
            message = f"POST {self._url}: no answer before the deadline; allow more time or look at /ready"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        return self._reply(result)

    def _reply(self, result: BatchResult[ReplyT] | Exception | None) -> ReplyT | None:
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
            note_problem(reason_of(result))
            reason = reason_of(result)
            add_incident(incident_of(result), called=self._called, url=self._url, attempt=1, reason=reason)
        return None

    def _start(self, group: str, replica: str | None) -> None:
        """Send what has been collected, unless it is a single request or has been cancelled."""
        together = [waiting for waiting in self._waiting.pop((group, replica)) if not waiting.result.done()]
        for batch in _batches(together):
            if len(batch) == 1:
                batch[0].result.set_result(None)
                continue
            # An empty context: the request belongs to the traces of all its entries.
            task = asyncio.create_task(self._send(batch, group, replica), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for waiting in batch:
                waiting.result.add_done_callback(lambda _, batch=batch, task=task: _cancel_if_unwanted(batch, task))

    async def _send(self, batch: list[_Waiting[RequestT, ReplyT]], group: str, replica: str | None) -> None:
        entries = [
            self._entry_type.model_construct(request=waiting.request, trace=waiting.context.run(_trace_headers))
            for waiting in batch
        ]
        request = self._batch_type.model_construct(entries=entries)
        deadline = max((waiting.deadline for waiting in batch), key=lambda deadline: deadline.at)
        failure: Exception | None = None
        try:
            with noted_in([wait for waiting in batch for wait in waiting.waits]):
                async with self._open_batch(request, group, deadline, replica) as lines:
                    async for line in lines:
                        result = self._result_type.model_validate_json(line)
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


def _trace_headers() -> dict[str, str]:
    headers: dict[str, str] = {}
    inject(headers)
    return headers


def _batches(together: list[_Waiting[RequestT, ReplyT]]) -> list[list[_Waiting[RequestT, ReplyT]]]:
    """Parts of at most MAX_BATCH requests and of size MAX_BATCH_SIZE."""
    parts: list[list[_Waiting[RequestT, ReplyT]]] = []
    filled = 0
    for waiting in together:
        if not parts or len(parts[-1]) == MAX_BATCH or filled + waiting.size > MAX_BATCH_SIZE:
            parts.append([])
            filled = 0
        parts[-1].append(waiting)
        filled += waiting.size
    return parts


def _cancel_if_unwanted(batch: list[_Waiting[RequestT, ReplyT]], task: asyncio.Task[None]) -> None:
    """Close the request when every caller has given up."""
    if all(waiting.result.cancelled() for waiting in batch):
        task.cancel()
