"""What became of the spans of every process of the deployment while a run lasted."""

import asyncio
import time
from collections.abc import Callable, Mapping

from trackway.clients import CallPolicy, ServiceClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health, ReplicaList, SpanCounts
from trackway.wire.trainer import TraceSummary

ASK_EVERY_S = 15.0
"""Shortest time between two looks during a run; each is one request per service."""
_PAUSE_S = 0.5
_ASK = CallPolicy(connect_s=2.0, read_s=5.0, total_s=5.0, attempts=1)


class SpanAccounts:
    """Counts of each process, as differences between the run's start and now.

    A process that is gone keeps its last counts, except what waited there: its folder on disk is taken over by another.
    """

    def __init__(
        self, services: Mapping[str, str], own: Callable[[], SpanCounts], earlier: TraceSummary | None = None
    ) -> None:
        """`services` are URLs by name, `own` gives this process's counts, `earlier` is what a resumed run had."""
        self._services = services
        self._own = own
        self._earlier = earlier or TraceSummary()
        self._start: dict[str, SpanCounts] = {}
        self._last: dict[str, SpanCounts] = {}
        self._living: set[str] = set()
        self._unknown: list[str] = []
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take the counts that the run starts from."""
        await self._look()
        self._start = dict(self._last)

    def refresh(self) -> None:
        """Look again without waiting for it, unless that was done a moment ago."""
        idle = self._looking is None or self._looking.done()
        if idle and time.monotonic() - self._looked_at >= ASK_EVERY_S:
            self._looking = asyncio.create_task(self._look())

    async def settle(self, deadline_s: float) -> None:
        """Look until no span waits, at most until the deadline."""
        end = time.monotonic() + deadline_s
        if self._looking is not None:
            await self._looking
        await self._look()
        while self.summary().spans_waiting and time.monotonic() < end:
            await asyncio.sleep(_PAUSE_S)
            await self._look()

    def summary(self, trajectories: int = 0, size: int = 0) -> TraceSummary:
        """The run's sums; `trajectories` and `size` are those that this process traced."""
        own = self._own()
        now = [own, *(self._last[name] for name in self._living)]
        return TraceSummary(
            trajectories=self._earlier.trajectories + trajectories,
            bytes=self._earlier.bytes + size,
            spans_dropped=self._earlier.spans_dropped + own.dropped + self._grown(lambda counts: counts.dropped),
            spans_refused=self._earlier.spans_refused + own.refused + self._grown(lambda counts: counts.refused),
            spans_waiting=sum(counts.waiting for counts in now),
            spool_bytes=sum(counts.spool_bytes for counts in now),
            unknown=self._unknown,
        )

    def _grown(self, count: Callable[[SpanCounts], int]) -> int:
        return sum(count(last) - count(self._start.get(name, SpanCounts())) for name, last in self._last.items())

    async def _look(self) -> None:
        answers = await asyncio.gather(*(_processes(url) for url in self._services.values()))
        found = dict(zip(self._services, answers, strict=True))
        self._unknown = [name for name, processes in found.items() if processes is None]
        counts = {
            f"{name}/{health.replica}": health.spans for name, processes in found.items() for health in processes or []
        }
        self._last |= counts
        self._living = set(counts)
        self._looked_at = time.monotonic()


async def _processes(url: str) -> list[Health] | None:
    """Every process of a service: its replicas under Ray Serve, else the one that answers; None without an answer."""
    client = ServiceClient(url, policy=_ASK)
    try:
        replicas = (await client.call("GET", "/replicas", reply=ReplicaList)).replicas
    except TrackwayError as error:
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED):
            return None
        try:
            return [await client.call("GET", "/health", reply=Health)]
        except TrackwayError:
            return None
    return [replica.health for replica in replicas]
