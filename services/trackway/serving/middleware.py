"""What wraps each request, as plain ASGI: trace context, the last-resort error answer, deadline.

FastAPI's own telemetry is left out on purpose: one span per hop of ours carries the content, and a second one around it
would only add a row to the tree.

The receipt in `x-trackway-trace` tells the caller what its request added to the trace. It is written where each answer
passes before idempotency keeps it: errors carry one, and a repeated answer carries that of the run which made it, as a
client asks again only when it has not seen the first. A streamed answer has none: its headers leave before the work.
"""

import asyncio
import logging
import time
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.serving.error_responses import error_response
from trackway.serving.user_code import described, failure_of
from trackway.system.storage import FULL, error_number, storage_error
from trackway.tracing import TraceStats, Tracing, extracted, ledger
from trackway.tracing.active import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.headers import REPLICA, REQUEST_DEADLINE, TRACE_RECEIPT

logger = logging.getLogger("trackway.serving")

_TRACE_HEADERS = ("traceparent", "tracestate", "baggage")


class TraceContext:
    """Continues the caller's trace under this service's tracing, and sums up what the request adds to it."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with activated(self.tracing), extracted(_carried(scope)), ledger() as sums:
            scope["ledger"] = sums
            await self.app(scope, receive, send)


def _carried(scope: Scope) -> dict[str, str]:
    """The headers of the trace; lines of one name are one list (RFC 9110, 5.3), which a proxy may have split."""
    headers = Headers(scope=scope)
    return {name: ",".join(lines) for name in _TRACE_HEADERS if (lines := headers.getlist(name))}


class CatchAllErrors:
    """Answers 500 `internal` for an unhandled exception of any kind, and logs it once.

    All answers leave through here, and so get their receipt here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

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
            await error_response(error)(scope, receive, watch)
        except BaseException as error:
            if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if started and isinstance(error, Exception):
                raise
            if started:
                raise failure_of(error) from error
            await error_response(_unforeseen(failure_of(error)))(scope, receive, watch)


def _unforeseen(error: Exception) -> TrackwayError:
    """A full disk is named, whatever was being written to it; anything else is a defect."""
    number = error_number(error)
    if number in FULL:
        place = Path(str(error.filename)) if isinstance(error, OSError) and error.filename else Path.cwd()
        return storage_error(number, place, "a file of the service")
    message = f"{described(error)}; this is a defect of the service, its log has the traceback"
    return TrackwayError(ErrorCode.INTERNAL, message)


def _is_cancelled() -> bool:
    """Whether the current task was cancelled, and does not merely see a CancelledError of other making."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _add_receipt(scope: Scope, start: Message) -> None:
    sums: TraceStats | None = scope.get("ledger")
    if sums is not None and (receipt := sums.receipt()):
        MutableHeaders(scope=start)[TRACE_RECEIPT] = receipt


class ReplicaName:
    """Says on each answer which replica gave it."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self.app = app
        self.replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA] = self.replica
            await send(message)

        await self.app(scope, receive, signed if scope["type"] == "http" else send)


class DeadlineLimit:
    """Gives up at the caller's `x-request-deadline`: nobody waits for the answer any more."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = Headers(scope=scope).get(REQUEST_DEADLINE) if scope["type"] == "http" else None
        if deadline is None:
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(float(deadline) - time.time()):
                await self.app(scope, receive, send)
        except TimeoutError as error:
            message = f"the caller's deadline {deadline} passed while the request was worked on; allow more time"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
