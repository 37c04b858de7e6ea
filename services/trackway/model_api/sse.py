"""Server-sent events. The first is awaited before the response starts, so that an early error sets the status."""

import logging
from collections.abc import AsyncGenerator, Callable
from types import MappingProxyType

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from trackway.wire.errors import ErrorCode, TrackwayError

MEDIA_TYPE, HEADERS = "text/event-stream", MappingProxyType({"cache-control": "no-cache"})
_log = logging.getLogger(__name__)

Failed = Callable[[TrackwayError], str]
"""The last event of a stream that failed."""


class EventStream(StreamingResponse):
    """Sends events as they arrive; closes the source when the client disconnects."""

    def __init__(self, first: str, others: AsyncGenerator[str], failed: Failed) -> None:
        lines = _lines(first, others, failed)
        super().__init__(lines, media_type=MEDIA_TYPE, headers=HEADERS)
        self._source = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


def event(data: str, name: str | None = None) -> str:
    """One event, with its blank line."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def comment(text: str) -> str:
    """A comment, which every client skips."""
    return f": {text}\n\n"


async def _lines(first: str, others: AsyncGenerator[str], failed: Failed) -> AsyncGenerator[str]:
    yield first
    try:
        async for line in others:
            yield line
    except TrackwayError as error:
        yield failed(error)
    except Exception as error:
        _log.exception("a stream failed")
        message = f"{type(error).__name__}: {error}; this is a bug; see the traceback in the service's log"
        yield failed(TrackwayError(ErrorCode.INTERNAL, message))
