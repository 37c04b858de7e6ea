"""ASGI middleware around each request: trace context, last-resort error response, deadline.

FastAPI's own telemetry is not used, because our span per hop already carries the content.

The receipt in `x-trackway-trace` reports what the request added to the trace. It is written before idempotency stores
the response: errors have one, and a repeated response has that of the original, since a client retries only when it has
not seen the first. A streamed response has none: its headers are sent before the work.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.serving.limits import header_of
from trackway.serving.routes import error_answer_to
from trackway.serving.user_code import described, failure_of
from trackway.system.files import FULL, error_number, storage_error
from trackway.tracing import TraceStats, Tracing, collect_trace_stats, extracted
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import REPLICA, REQUEST_TIMEOUT, TRACE_RECEIPT

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
