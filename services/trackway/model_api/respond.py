"""Answers one request: generates its choices and sends the response, whole or streamed."""

from collections.abc import AsyncGenerator, Sequence
from contextvars import Context

from fastapi import Request, Response

from trackway.model_api.choices import Generates, Job, as_they_come, while_connected, wholes
from trackway.model_api.response_builder import Record, ResponseBuilder
from trackway.model_api.sse import EventStream
from trackway.model_api.stream_decoder import NOTHING, Delta

KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a stream sends one that means nothing; proxies close idle connections at 60."""


async def respond(
    request: Request,
    generator: Generates,
    builder: ResponseBuilder,
    jobs: Sequence[Job],
    *,
    stream: bool,
    record: Record | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
    context: Context | None = None,
) -> Response:
    """The response of `builder`. A client that disconnects aborts the generations, which run in `context`.

    An error before the first token, or before `keep_alive_s` have passed without one, sets the status of a stream.
    """
    if not stream:
        try:
            deltas = await while_connected(request, wholes(generator, jobs), context)
        except BaseException:
            if record is not None:
                record([NOTHING for _ in jobs])
            raise
        body = builder.whole(deltas)
        if record is not None:
            record(deltas)
        return Response(body, media_type="application/json")
    events = builder.events(as_they_come(generator, jobs, keep_alive_s), record)
    return EventStream(await while_connected(request, _first(events), context), events, builder.failed)


async def respond_again(builder: ResponseBuilder, deltas: Sequence[Delta], *, stream: bool) -> Response:
    """The response from recorded choices, without a generation."""
    if not stream:
        return Response(builder.whole(deltas), media_type="application/json")
    events = builder.events(_replayed(deltas))
    return EventStream(await _first(events), events, builder.failed)


async def _replayed(deltas: Sequence[Delta]) -> AsyncGenerator[tuple[int, Delta] | None]:
    for item in enumerate(deltas):
        yield item


async def _first(events: AsyncGenerator[str]) -> str:
    return await anext(events)
