"""`/replicas/metrics`: the `/metrics` of every replica of a service, as one text for Prometheus.

A scrape through Ray Serve's proxy reaches a different replica each time. Here the label `replica` names the replica of
each sample.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from trackway.deploy.serve.fan_out import Broadcast
from trackway.wire.errors import ErrorCode, TrackwayError

ASK_METRICS_S = 5.0
"""Longest wait for a replica's answer; half of Prometheus' scrape timeout."""
TEXT = "text/plain; version=0.0.4"


class ReplicaMetrics(NamedTuple):
    """The metrics of one replica."""

    replica: str
    text: str


def metrics_route(ask_each: Broadcast) -> APIRouter:
    """The route for Prometheus. A replica that does not answer in time is omitted and counted."""
    router = APIRouter(tags=["service"])

    @router.get("/replicas/metrics", response_class=PlainTextResponse)
    async def replicas_metrics() -> PlainTextResponse:
        """Metrics of every replica in Prometheus' text format, with the label `replica`."""
        try:
            answers = await ask_each("exposition", within_s=ASK_METRICS_S)
        except TimeoutError as error:
            message = f"Ray Serve did not name this service's replicas within {ASK_METRICS_S:.0f} s; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        shown = {metrics.replica: metrics.text for metrics in answers if isinstance(metrics, ReplicaMetrics)}
        return PlainTextResponse(merged(shown, asked=len(answers)), media_type=TEXT)

    return router


def merged(texts: Mapping[str, str], asked: int) -> str:
    """The texts of all replicas (name -> text) merged into one, with each metric described once."""
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for metric in text_string_to_metric_families(text):
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    counts = [
        GaugeMetricFamily("trackway_replicas_asked", "Running replicas of this service", asked),
        GaugeMetricFamily("trackway_replicas_answered", "Replicas whose metrics are included", len(texts)),
    ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*families.values(), *counts]))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._families
