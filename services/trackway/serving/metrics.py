"""Metrics of one service by OpenTelemetry; `/metrics` shows them in Prometheus' text for a local look."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.tracing import Tracing
from trackway.wire.errors import TrackwayError


class Gauge(NamedTuple):
    """A number of a service's own that `/metrics` shows; `read` may raise TrackwayError while there is none yet."""

    name: str
    description: str
    read: Callable[[], float]
    total: bool = False
    """It only grows while the process lives."""


class ServiceMetrics:
    """Requests by route and status, requests in flight, seconds; spans by their fate; what the service adds."""

    def __init__(self, service: str, tracing: Tracing, gauges: Sequence[Gauge] = ()) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry)
        self._provider = MeterProvider([reader], resource=Resource({"service.name": service}), shutdown_on_exit=False)
        self.meter = self._provider.get_meter("trackway")
        self.requests = self.meter.create_counter("trackway_requests", description="Requests by route and status")
        self.in_flight = self.meter.create_up_down_counter("trackway_in_flight", description="Requests in work")
        self.seconds = self.meter.create_histogram("trackway_request_seconds", unit="s")
        spans = _span_counts(tracing)
        self.meter.create_observable_counter("trackway_spans", callbacks=[spans], description="Spans by fate")
        waiting = _spans_waiting(tracing)
        self.meter.create_observable_gauge("trackway_spans_waiting", callbacks=[waiting], description="Spans to send")
        on_disk = _spool_bytes(tracing)
        self.meter.create_observable_gauge("trackway_spool_bytes", callbacks=[on_disk], description="Traces on disk")
        for gauge in gauges:
            create = self.meter.create_observable_counter if gauge.total else self.meter.create_observable_gauge
            create(gauge.name, callbacks=[_observing(gauge)], description=gauge.description)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


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

        self.metrics.in_flight.add(1)
        try:
            await self.app(scope, receive, watch)
        finally:
            labels = {"route": _route(scope), "method": scope["method"], "status": status}
            self.metrics.in_flight.add(-1)
            self.metrics.requests.add(1, labels)
            self.metrics.seconds.record(time.perf_counter() - started, {"route": labels["route"]})


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return getattr(route, "path", "unmatched")
