"""Server-sent events. The first is awaited before the response starts, so that an early error sets the status."""

import json
import logging
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from trackway.rollout.openai.errors import openai_body
from trackway.wire.errors import ErrorCode, TrackwayError

_log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """Sends events as they arrive and `[DONE]` after the last; closes the source when the client disconnects."""

    def __init__(self, first: str, others: AsyncGenerator[str]) -> None:
        super().__init__(_lines(first, others), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._source = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def _lines(first: str, others: AsyncGenerator[str]) -> AsyncGenerator[str]:
    yield _event(first)
    try:
        async for event in others:
            yield _event(event)
    except TrackwayError as error:
        yield _event(json.dumps(openai_body(error)))
    except Exception as error:
        _log.exception("a stream failed")
        message = f"{type(error).__name__}: {error}; this is a bug; see the traceback in the service's log"
        yield _event(json.dumps(openai_body(TrackwayError(ErrorCode.INTERNAL, message))))
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"
