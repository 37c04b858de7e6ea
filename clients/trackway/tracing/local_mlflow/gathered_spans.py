"""Spans of several requests, stored in one transaction of MLflow's store."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GATHER_S = 2.0
"""Longest time that spans wait for the rest of their traces."""
MAX_TRACES = 128
"""Traces per transaction. More would keep other requests waiting for seconds."""

Spans = list[Any]


@dataclass
class _Call:
    """Spans of one request that wait to be stored."""

    location: str
    spans: Spans
    arrived: float
    answer: "asyncio.Future[Spans]"


class GatheredSpans:
    """Stores spans of several requests together: at once when each trace has its root, else after GATHER_S."""

    def __init__(self, store: Callable[[str, Spans], Spans]) -> None:
        self._store = store
        self._calls: list[_Call] = []
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def log(self, location: str, spans: Spans) -> Spans:
        """Store the spans in an experiment. Raises what the store raises for them."""
        call = _Call(location, spans, time.monotonic(), asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await call.answer

    async def _work(self) -> None:
        while self._calls:
            await self._gather()
            await self._settle(self._take())

    async def _gather(self) -> None:
        while (left := self._calls[0].arrived + GATHER_S - time.monotonic()) > 0 and not self._is_enough():
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left)

    def _is_enough(self) -> bool:
        spans = [span for call in self._calls for span in call.spans]
        traces = {span.trace_id for span in spans}
        return len(traces) >= MAX_TRACES or traces == {span.trace_id for span in spans if span.parent_id is None}

    def _take(self) -> list[_Call]:
        """Remove and return the oldest call, and later ones for the same experiment as far as MAX_TRACES allows."""
        taken: list[_Call] = []
        traces: set[str] = set()
        for call in list(self._calls):
            own = {span.trace_id for span in call.spans}
            if not taken or (call.location == taken[0].location and len(traces | own) <= MAX_TRACES):
                taken.append(call)
                traces |= own
                self._calls.remove(call)
        return taken

    async def _settle(self, calls: Sequence[_Call]) -> None:
        together = [span for call in calls for span in call.spans]
        try:
            await asyncio.to_thread(self._store, calls[0].location, together)
        except Exception as error:
            if len(calls) > 1:  # only the requests at fault fail
                for call in calls:
                    await self._settle([call])
            elif not calls[0].answer.done():
                calls[0].answer.set_exception(error)
            return
        for call in calls:
            if not call.answer.done():
                call.answer.set_result(call.spans)
