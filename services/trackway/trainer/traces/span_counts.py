"""Counts of sent, dropped and queued spans of every process of the deployment during a run."""

import asyncio
import time
from collections.abc import Callable, Mapping

from trackway.clients import CallPolicy, ServiceClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health, ReplicaList, SpanCounts
from trackway.wire.trainer import TraceSummary

QUERY_INTERVAL_S = 15.0
"""Shortest interval between two queries during a run. Each is one request per service."""
_PAUSE_S = 0.5
_HEALTH_POLICY = CallPolicy.question(5.0)


class SpanAccounts:
    """Span counts of each process since the run's start.

    A process that has exited keeps its last counts, except for waiting spans: another process takes over its folder on
    disk.
    """

    def __init__(
        self, services: Mapping[str, str], own: Callable[[], SpanCounts], earlier: TraceSummary | None = None
    ) -> None:
        """`services` maps names to URLs, `own` returns this process's counts, `earlier` is a resumed run's summary."""
        self._services = services
        self._own = own
        self._earlier = earlier or TraceSummary()
        self._start: dict[str, SpanCounts] = {}
        self._last: dict[str, SpanCounts] = {}
        self._alive: set[str] = set()
        self._unknown: list[str] = []
        self._queried_at = 0.0
        self._query: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Record the counts at the run's start."""
        await self._query_services()
        self._start = dict(self._last)

    def refresh(self) -> None:
        """Start a query in the background, unless the last one is recent."""
        idle = self._query is None or self._query.done()
        if idle and time.monotonic() - self._queried_at >= QUERY_INTERVAL_S:
            self._query = asyncio.create_task(self._query_services())

    async def settle(self, deadline_s: float) -> None:
        """Query the services until no span is waiting, at most until the deadline."""
        end = time.monotonic() + deadline_s
        if self._query is not None:
            await self._query
        await self._query_services()
        while self.summary().spans_waiting and time.monotonic() < end:
            await asyncio.sleep(_PAUSE_S)
            await self._query_services()

    def summary(self, trajectories: int = 0, size: int = 0) -> TraceSummary:
        """The run's totals. `trajectories` and `size` (bytes) are those traced by this process."""
        own = self._own()
        current = [own, *(self._last[name] for name in self._alive)]
        return TraceSummary(
            trajectories=self._earlier.trajectories + trajectories,
            bytes=self._earlier.bytes + size,
            spans_dropped=self._earlier.spans_dropped + own.dropped + self._increase(lambda counts: counts.dropped),
            spans_refused=self._earlier.spans_refused + own.refused + self._increase(lambda counts: counts.refused),
            spans_waiting=sum(counts.waiting for counts in current),
            spool_bytes=sum(counts.spool_bytes for counts in current),
            unknown=self._unknown,
        )

    def _increase(self, count: Callable[[SpanCounts], int]) -> int:
        return sum(count(last) - count(self._start.get(name, SpanCounts())) for name, last in self._last.items())

    async def _query_services(self) -> None:
        answers = await asyncio.gather(*(_processes(url) for url in self._services.values()))
        by_service = dict(zip(self._services, answers, strict=True))
        self._unknown = [name for name, processes in by_service.items() if processes is None]
        counts = {
            f"{name}/{process.replica}": process.spans
            for name, processes in by_service.items()
            for process in processes or []
        }
        self._last |= counts
        self._alive = set(counts)
        self._queried_at = time.monotonic()


async def _processes(url: str) -> list[Health] | None:
    """The processes of a service: its replicas under Ray Serve, else the process that answers; None without answer."""
    client = ServiceClient(url, policy=_HEALTH_POLICY)
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
