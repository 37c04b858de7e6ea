"""Generations of one request: side by side, each in its own trace and with its own outcome."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from trackway.rollout.service import RolloutService
from trackway.serving.metrics import BatchLoad
from trackway.serving.middleware import unforeseen
from trackway.tracing import collect_trace_stats, extracted
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import BatchEntry, BatchResult

_log = logging.getLogger(__name__)


async def run_batch(
    service: RolloutService, entries: Sequence[BatchEntry], load: BatchLoad
) -> AsyncGenerator[str, None]:
    """A line of JSON for each BatchResult, in the order in which they end; closing the generator aborts the rest."""
    running = {asyncio.create_task(_run(service, index, entry)) for index, entry in enumerate(entries)}
    extra = len(running) - 1
    load.extra += extra
    try:
        while running:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            before, extra = extra, max(0, len(running) - 1)
            load.extra -= before - extra
            results = sorted((task.result() for task in ended), key=lambda result: result.index)
            yield "".join(f"{result.model_dump_json(exclude_none=True)}\n" for result in results)
    finally:
        load.extra -= extra
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def _run(service: RolloutService, index: int, entry: BatchEntry) -> BatchResult:
    with extracted(entry.trace), collect_trace_stats() as stats:
        try:
            reply = await service.generate(entry.request)
        except TrackwayError as error:
            return BatchResult(index=index, error=error.to_reply().error, receipt=stats.receipt())
        except Exception as error:
            _log.exception("a generation of a batch failed")
            return BatchResult(index=index, error=unforeseen(error).to_reply().error, receipt=stats.receipt())
        return BatchResult(index=index, reply=reply, receipt=stats.receipt())
