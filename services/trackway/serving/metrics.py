"""Metrics of a service, by prometheus_client; `/metrics` exposes them in Prometheus' text format."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.tracing import Tracing
from trackway.wire.errors import TrackwayError

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# A time of creation for each counter and histogram would double the number of series.
disable_created_metrics()


class Gauge(NamedTuple):
    """A gauge of a service. `read` may raise TrackwayError while there is no value yet."""

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
        self.in_flight = PrometheusGauge(
            "trackway_in_flight", "Requests in progress; those of a batch count singly", registry=None
        )
        self.requests = Counter(
            "trackway_requests", "Requests by route and status", ["route", "method", "status"], registry=None
        )
        self.seconds = seconds_histogram("trackway_request_seconds", "Duration of requests in seconds", "route")
        self.collectors: list[Collector] = [self.in_flight, self.requests, self.seconds, *collectors]
        """Collectors of all metrics."""
        self.collectors += [_Target(service), _Spans(tracing), *map(_Read, gauges)]
        self._registry = CollectorRegistry()
        for collector in self.collectors:
            self._registry.register(collector)

    @property
    def requests_in_flight(self) -> int:
        """The number of requests in progress, counting each entry of a batch."""
        [metric] = self.in_flight.collect()
        return int(metric.samples[0].value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Collectors(Collector):
    """Several metrics as one collector."""

    def __init__(self, *collectors: Collector) -> None:
        self.collectors = collectors

    def collect(self) -> Iterable[Metric]:
        """The metrics of each."""
        return chain.from_iterable(collector.collect() for collector in self.collectors)


def seconds_histogram(name: str, description: str, label: str) -> Histogram:
    """A histogram of durations by one label, in no registry yet."""
    return Histogram(name, description, [label], buckets=_BUCKETS_S, registry=None)


class OperationDuration(Collectors):
    """Durations of an operation of the GenAI conventions, under its name there. `error_type` is empty for a success."""

    def __init__(
        self, operation: str, name: str, description: str, *labels: str, buckets: Sequence[float] = _BUCKETS_S
    ) -> None:
        self._operation = operation
        self._seconds = Histogram(
            f"gen_ai_{name}_duration_seconds",
            description,
            ["gen_ai_operation_name", *labels, "error_type"],
            buckets=buckets,
            registry=None,
        )
        super().__init__(self._seconds)

    def observe(self, seconds: float, error_type: str, *values: str) -> None:
        """Add one operation, with the values of the labels."""
        self._seconds.labels(self._operation, *values, error_type).observe(seconds)

    @contextmanager
    def timed(self, *values: str) -> Iterator[None]:
        """Around one operation."""
        started, error_type = time.perf_counter(), ""
        try:
            yield
        except BaseException as error:
            error_type = error.code.value if isinstance(error, TrackwayError) else type(error).__name__
            raise
        finally:
            self.observe(time.perf_counter() - started, error_type, *values)


class _Target(Collector):
    def __init__(self, service: str) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("target", "Target metadata", {"service_name": self._service})


class _Read(Collector):
    """The value of a gauge at the time of the scrape."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily if self._gauge.total else GaugeMetricFamily
        try:
            yield family(self._gauge.name, self._gauge.description, self._gauge.read())
        except TrackwayError:
            return


class _Spans(Collector):
    """Counts of spans by fate and backend."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def collect(self) -> Iterator[Metric]:
        stats = self._tracing.stats()
        spans = CounterMetricFamily("trackway_spans", "Spans by fate", labels=["fate", "backend"])
        spans.add_metric(["ended", ""], stats.ended)
        spans.add_metric(["dropped", ""], stats.dropped)
        waiting = GaugeMetricFamily("trackway_spans_waiting", "Spans that wait to be exported", labels=["backend"])
        on_disk = GaugeMetricFamily("trackway_spool_bytes", "Bytes of spans that wait on disk", labels=["backend"])
        for backend, its in stats.backends.items():
            for fate, count in (("exported", its.exported), ("refused", its.refused), ("dropped", its.dropped)):
                spans.add_metric([fate, backend], count)
            waiting.add_metric([backend], its.waiting)
            on_disk.add_metric([backend], its.spool_bytes)
        yield from (spans, waiting, on_disk)


class RequestMetrics:
    """ASGI middleware that counts and times requests by their route's pattern."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app = app
        self.metrics = metrics
        # The client's own look-up of a series is the longest part of counting.
        self._requests, self._seconds = cache(metrics.requests.labels), cache(metrics.seconds.labels)

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

        try:
            with self.metrics.in_flight.track_inprogress():
                await self.app(scope, receive, watch)
        finally:
            route = _route(scope)
            self._requests(route, _method(scope), status).inc()
            self._seconds(route).observe(time.perf_counter() - started)


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return getattr(route, "path", "unmatched")


def _method(scope: Scope) -> str:
    """The method if it is a usual one: arbitrary methods would create unlimited series."""
    return scope["method"] if scope["method"] in _METHODS else "other"
