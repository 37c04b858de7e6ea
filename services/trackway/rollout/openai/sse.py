"""Server-sent events: the first is there before the answer begins, so that a refusal is a status and no event."""

import json
import logging
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from trackway.rollout.openai.errors import openai_body
from trackway.wire.errors import ErrorCode, TrackwayError

_log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """Sends events as they are made and `[DONE]` behind the last; the client's leaving closes their source at once."""

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
        message = f"{type(error).__name__}: {error}; this is a defect of the service, its log has the traceback"
        yield _event(json.dumps(openai_body(TrackwayError(ErrorCode.INTERNAL, message))))
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"
