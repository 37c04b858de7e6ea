"""ASGI middleware around each request: trace context, last-resort error response, deadline, idempotency, batches.

FastAPI's own telemetry is not used, because our span per hop already carries the content.

The receipt in `x-trackway-trace` reports what the request added to the trace. It is written before idempotency stores
the response: errors have one, and a repeated response has the original's, since a client retries only when it has
not seen the first. A streamed response has none: its headers are sent before the work.

A POST runs once per `Idempotency-Key`: a repeated key waits for the first response, or gets it again. A keyed request
continues when its client disconnects, since the client will retry. Responses are kept in memory, limited in number,
bytes and age. Transient errors are not kept, as nothing was done. A keyed response is sent when it is complete, so a
client that streams must not send a key.

The requests of a batch run at the same time, each in its own trace and with its own outcome. Their answers are
streamed, one JSON document per line.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastapi.responses import StreamingResponse
from prometheus_client import Gauge
from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.serving.auth import CALLER, Caller
from trackway.serving.limits import header_of
from trackway.serving.routes import error_answer_to
from trackway.serving.user_code import described, failure_of
from trackway.system.files import FULL, error_number, storage_error
from trackway.tracing import TraceStats, Tracing, collect_trace_stats, extracted
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import (
    IDEMPOTENCY_KEY,
    REPLICA,
    REQUEST_TIMEOUT,
    TRACE_RECEIPT,
    BatchEntry,
    BatchResult,
    ReplyT,
    RequestT,
)

logger = logging.getLogger("trackway.serving")

_TRACE_HEADERS = frozenset((b"traceparent", b"tracestate", b"baggage"))


class TraceContext:
    """Continues the caller's trace under this service's tracing, and counts what the request adds to it."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with activated(self.tracing), extracted(_carried(scope)), collect_trace_stats() as sums:
            scope["trace_stats"] = sums
            await self.app(scope, receive, send)


def _carried(scope: Scope) -> dict[str, str]:
    """The trace headers. Repeated lines are joined to one list (RFC 9110, 5.3), as a proxy may have split them."""
    carried: dict[str, str] = {}
    for raw, value in scope["headers"]:
        if raw in _TRACE_HEADERS:
            name, line = raw.decode(), value.decode("latin-1")
            carried[name] = f"{carried[name]},{line}" if name in carried else line
    return carried


class CatchAllErrors:
    """Answers 500 `internal` for an unhandled exception of any kind, and logs it once.

    All responses pass here, so their receipt is added here. An error in a middleware has the format of its `routes`.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute] = ()) -> None:
        self.app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _add_receipt(scope, message)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except TrackwayError as error:
            if started:
                raise
            await error_answer_to(scope, self._routes, error)(scope, receive, watch)
        except BaseException as error:
            if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if started and isinstance(error, Exception):
                raise
            if started:
                raise failure_of(error) from error
            await error_answer_to(scope, self._routes, unforeseen(failure_of(error)))(scope, receive, watch)


def unforeseen(error: Exception) -> TrackwayError:
    """The error for an unexpected exception: a full disk is reported as such, anything else is a bug."""
    number = error_number(error)
    if number in FULL:
        place = Path(str(error.filename)) if isinstance(error, OSError) and error.filename else Path.cwd()
        return storage_error(number, place, "a file of the service")
    message = f"{described(error)}; this is a bug; see the traceback in the service's log"
    return TrackwayError(ErrorCode.INTERNAL, message)


def is_cancelled() -> bool:
    """Return whether the current task was cancelled, rather than one that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _add_receipt(scope: Scope, start: Message) -> None:
    sums: TraceStats | None = scope.get("trace_stats")
    if sums is not None and (receipt := sums.receipt()):
        MutableHeaders(scope=start)[TRACE_RECEIPT] = receipt


class ReplicaName:
    """Names the replica on each response."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self.app = app
        self._header = REPLICA.encode(), replica.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = self._header
                message["headers"] = [*(header for header in message["headers"] if header[0] != own[0]), own]
            await send(message)

        await self.app(scope, receive, signed if scope["type"] == "http" else send)


class DeadlineLimit:
    """Stops work when the seconds of the caller's `x-request-timeout` have passed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = header_of(scope, REQUEST_TIMEOUT.encode()) if scope["type"] == "http" else None
        if seconds is None:
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(float(seconds)):
                await self.app(scope, receive, send)
        except TimeoutError as error:
            message = f"expected an answer within the caller's {float(seconds):g} s, got none; allow more time"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error


UNBROKEN = "trackway.unbroken"
"""Key of the ASGI scope: true if running requests are never cancelled and need no task of their own."""

_NOTHING_DONE = {409, 429, 503}
"""Not 504: work may have had its effect when its deadline passed."""
_ENTRY_BYTES = 2048
"""Bytes of an entry without its body."""


class _Key(NamedTuple):
    caller: Caller | None
    path: str
    header: str


@dataclass
class _Entry:
    digest: str
    answer: asyncio.Future[list[Message]]
    made_at: float
    bytes: int = 0


class Idempotency:
    """ASGI middleware. Keeps up to `max_entries` responses, `max_bytes` in all, for `ttl_s` seconds; always the newest.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_entries: int = 32_768,
        ttl_s: float = 600.0,
        max_bytes: int = 128 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.clock = clock
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.ttl_s = ttl_s
        self._bytes = 0
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = header_of(scope, IDEMPOTENCY_KEY.encode()) if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        for message in await self._answer(_Key(scope.get(CALLER), scope["path"], key), scope, body):
            await send(message)

    async def _answer(self, key: _Key, scope: Scope, body: bytes) -> list[Message]:
        self._forget_old()
        digest = hashlib.sha256(body).hexdigest()
        entry = self._entries.get(key)
        if entry is None:
            return await self._first_answer(key, digest, scope, body)
        if entry.digest != digest:
            message = f"{IDEMPOTENCY_KEY} {key.header!r} was used with another body; take a new key"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        return await asyncio.shield(entry.answer)

    async def _first_answer(self, key: _Key, digest: str, scope: Scope, body: bytes) -> list[Message]:
        if not scope.get(UNBROKEN):
            work = asyncio.create_task(self._run(key, scope, body))
            self._entries[key] = _Entry(digest, work, self.clock())
            return await asyncio.shield(work)
        answer = asyncio.get_running_loop().create_future()
        self._entries[key] = _Entry(digest, answer, self.clock())
        try:
            answer.set_result(await self._run(key, scope, body))
        except BaseException as error:
            answer.set_exception(error)
            answer.exception()  # no other request may be waiting for it
            raise
        return answer.result()

    async def _run(self, key: _Key, scope: Scope, body: bytes) -> list[Message]:
        answer: list[Message] = []
        received = False

        async def receive() -> Message:
            nonlocal received
            if received:
                await asyncio.Event().wait()
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            answer.append(message)

        try:
            await self.app(scope, receive, send)
        except BaseException:
            self._entries.pop(key, None)
            raise
        if answer[0]["status"] in _NOTHING_DONE:
            del self._entries[key]
        else:
            entry = self._entries[key]
            entry.bytes = _ENTRY_BYTES + sum(len(message.get("body", b"")) for message in answer)
            self._bytes += entry.bytes
        return answer

    def _forget_old(self) -> None:
        """Drop responses from the oldest on. Stops at one that is still in progress."""
        horizon = self.clock() - self.ttl_s
        while self._entries:
            oldest = next(iter(self._entries.values()))
            within = len(self._entries) <= self.max_entries and self._bytes <= self.max_bytes
            if (within and oldest.made_at >= horizon) or not oldest.answer.done():
                return
            self._entries.popitem(last=False)
            self._bytes -= oldest.bytes


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TrackwayError(ErrorCode.REQUEST_INCOMPLETE, "the client disconnected before its request was complete")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


class NdjsonStream(StreamingResponse):
    """Sends each text of whole lines as it comes, and closes `texts` when the client has disconnected."""

    media_type = "application/x-ndjson"

    def __init__(self, texts: AsyncGenerator[str, None]) -> None:
        super().__init__(texts)
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette leaves an unfinished iterator to the garbage collector, too late to stop its work.
        async with aclosing(self._texts):
            await super().__call__(scope, receive, send)


class BatchLoad:
    """Work in progress that a count of HTTP requests misses.

    in_flight: the gauge of requests in progress.
    """

    def __init__(self, in_flight: Gauge | None = None) -> None:
        self.extra = 0
        """Unfinished entries of batches, without the first of each."""
        self._in_flight = in_flight

    def add(self, entries: int) -> None:
        """Count so many entries more; fewer if negative."""
        self.extra += entries
        if self._in_flight is not None:
            self._in_flight.inc(entries)


async def run_batch(
    answer: Callable[[RequestT], Awaitable[ReplyT]], entries: Sequence[BatchEntry[RequestT]], load: BatchLoad
) -> AsyncGenerator[str, None]:
    """A line of JSON for each BatchResult, in the order in which they end; closing the generator cancels the rest."""
    running = {asyncio.create_task(_run(answer, index, entry)) for index, entry in enumerate(entries)}
    extra = len(running) - 1
    load.add(extra)
    try:
        while running:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            before, extra = extra, max(0, len(running) - 1)
            load.add(extra - before)
            results = sorted((task.result() for task in ended), key=lambda result: result.index)
            yield "".join(f"{result.model_dump_json(exclude_none=True)}\n" for result in results)
    finally:
        load.add(-extra)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def _run(
    answer: Callable[[RequestT], Awaitable[ReplyT]], index: int, entry: BatchEntry[RequestT]
) -> BatchResult[ReplyT]:
    with extracted(entry.trace), collect_trace_stats() as stats:
        try:
            reply = await answer(entry.request)
        except TrackwayError as error:
            return BatchResult(index=index, error=error.to_reply().error, receipt=stats.receipt())
        except Exception as error:
            logger.exception("a request of a batch failed")
            return BatchResult(index=index, error=unforeseen(error).to_reply().error, receipt=stats.receipt())
        return BatchResult(index=index, reply=reply, receipt=stats.receipt())
