"""Metrics of a service, by OpenTelemetry; `/metrics` exposes them in Prometheus' text format.

Requests are counted in plain integers, which become metrics only at a scrape.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.tracing import Tracing
from trackway.wire.errors import TrackwayError

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Gauge(NamedTuple):
    """A gauge of a service; `read` may raise TrackwayError while there is no value yet."""

    name: str
    description: str
    read: Callable[[], float]
    total: bool = False
    """The value only grows while the process runs."""


class ServiceMetrics:
    """Requests by route and status, requests in flight, durations; span counts; and the service's own metrics."""

    def __init__(
        self, service: str, tracing: Tracing, gauges: Sequence[Gauge] = (), collectors: Sequence[Collector] = ()
    ) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry)
        self._provider = MeterProvider([reader], resource=Resource({"service.name": service}), shutdown_on_exit=False)
        self.requests = RequestCounts()
        for collector in (self.requests, *collectors):
            self._registry.register(collector)
        meter = self._provider.get_meter("trackway")
        spans = _span_counts(tracing)
        meter.create_observable_counter("trackway_spans", callbacks=[spans], description="Spans by fate")
        waiting = _spans_waiting(tracing)
        meter.create_observable_gauge(
            "trackway_spans_waiting", callbacks=[waiting], description="Spans that wait to be exported"
        )
        on_disk = _spool_bytes(tracing)
        meter.create_observable_gauge(
            "trackway_spool_bytes", callbacks=[on_disk], description="Bytes of spans that wait on disk"
        )
        for gauge in gauges:
            create = meter.create_observable_counter if gauge.total else meter.create_observable_gauge
            create(gauge.name, callbacks=[_observing(gauge)], description=gauge.description)

    def collect(self) -> Iterable[Metric]:
        """All metrics with type, description and samples."""
        return self._registry.collect()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Seconds:
    """A histogram of durations by one label."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._buckets: dict[str, list[int]] = {}

    def add(self, label: str, seconds: float) -> None:
        """One more."""
        if label not in self._buckets:
            self._sums[label], self._buckets[label] = 0.0, [0] * (len(_BUCKETS_S) + 1)
        self._sums[label] += seconds
        self._buckets[label][bisect_left(_BUCKETS_S, seconds)] += 1

    def family(self, name: str, description: str, label: str) -> Metric:
        """As Prometheus wants it."""
        family = HistogramMetricFamily(name, description, labels=[label])
        bounds = [*map(str, _BUCKETS_S), "+Inf"]
        for value, counts in self._buckets.items():
            family.add_metric([value], list(zip(bounds, accumulate(counts), strict=True)), self._sums[value])
        return family


class RequestCounts(Collector):
    """Active requests, and completed ones by route, method and status, with durations by route."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._seconds = Seconds()

    def ended(self, route: str, method: str, status: str, seconds: float) -> None:
        """One more."""
        self._ended[route, method, status] += 1
        self._seconds.add(route, seconds)

    def collect(self) -> Iterator[Metric]:
        """As Prometheus wants it."""
        yield GaugeMetricFamily("trackway_in_flight", "Requests in progress", self.in_flight)
        labels = ("route", "method", "status")
        yield counted("trackway_requests", "Requests by route and status", labels, self._ended)
        yield self._seconds.family("trackway_request_seconds", "Duration of requests in seconds", "route")


def counted(name: str, description: str, labels: Sequence[str], counts: Mapping[tuple[str, ...], float]) -> Metric:
    """A counter with labels."""
    family = CounterMetricFamily(name, description, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _observing(gauge: Gauge) -> Callable[[CallbackOptions], list[Observation]]:
    def observe(options: CallbackOptions) -> list[Observation]:
        try:
            return [Observation(gauge.read())]
        except TrackwayError:
            return []

    return observe


def _span_counts(tracing: Tracing) -> Callable[[CallbackOptions], list[Observation]]:
    def observe(options: CallbackOptions) -> list[Observation]:
        stats = tracing.stats()
        fates = [("ended", "", stats.ended), ("dropped", "", stats.dropped)]
        for backend, its in stats.backends.items():
            counts = {"exported": its.exported, "refused": its.refused, "dropped": its.dropped}
            fates += [(fate, backend, count) for fate, count in counts.items()]
        return [Observation(count, {"fate": fate, "backend": backend}) for fate, backend, count in fates]

    return observe


def _spans_waiting(tracing: Tracing) -> Callable[[CallbackOptions], list[Observation]]:
    def observe(options: CallbackOptions) -> list[Observation]:
        return [Observation(its.waiting, {"backend": name}) for name, its in tracing.stats().backends.items()]

    return observe


def _spool_bytes(tracing: Tracing) -> Callable[[CallbackOptions], list[Observation]]:
    def observe(options: CallbackOptions) -> list[Observation]:
        return [Observation(its.spool_bytes, {"backend": name}) for name, its in tracing.stats().backends.items()]

    return observe


class RequestMetrics:
    """ASGI middleware that counts and times requests by their route's pattern."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = "aborted"
        started = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        requests = self.metrics.requests
        requests.in_flight += 1
        try:
            await self.app(scope, receive, watch)
        finally:
            requests.in_flight -= 1
            requests.ended(_route(scope), _method(scope), status, time.perf_counter() - started)


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return getattr(route, "path", "unmatched")


def _method(scope: Scope) -> str:
    """The method if it is a usual one: arbitrary methods would create unlimited series."""
    return scope["method"] if scope["method"] in _METHODS else "other"
