"""Batches of requests: side by side, each in its own trace and with its own outcome.

Their answers are streamed, one JSON document per line.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from prometheus_client import Gauge
from starlette.types import Receive, Scope, Send

from trackway.serving.middleware import unforeseen
from trackway.tracing import collect_trace_stats, extracted
from trackway.wire.errors import TrackwayError
from trackway.wire.service import BatchEntry, BatchResult, ReplyT, RequestT


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


_log = logging.getLogger(__name__)


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
            _log.exception("a request of a batch failed")
            return BatchResult(index=index, error=unforeseen(error).to_reply().error, receipt=stats.receipt())
        return BatchResult(index=index, reply=reply, receipt=stats.receipt())
