"""`/replicas/metrics`: what every replica of a service shows under `/metrics`, as one text for Prometheus.

Through Ray Serve's proxy a scrape reaches any one replica, a different one each time; here each sample says whose it is
by the label `replica`.
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
"""Longest wait for a replica's answer; half of the time that Prometheus waits for all."""
TEXT = "text/plain; version=0.0.4"


class ReplicaMetrics(NamedTuple):
    """What one replica shows."""

    replica: str
    text: str


def metrics_route(ask_each: Broadcast) -> APIRouter:
    """For Prometheus; a replica that does not answer in time is left out and counted."""
    router = APIRouter(tags=["service"])

    @router.get("/replicas/metrics", response_class=PlainTextResponse)
    async def replicas_metrics() -> PlainTextResponse:
        """Metrics of every replica in Prometheus' text format, with the label `replica`."""
        try:
            answers = await ask_each("exposition", within_s=ASK_METRICS_S)
        except TimeoutError as error:
            message = f"Ray Serve did not name this service's replicas within {ASK_METRICS_S:.0f} s; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        shown = {one.replica: one.text for one in answers if isinstance(one, ReplicaMetrics)}
        return PlainTextResponse(merged(shown, asked=len(answers)), media_type=TEXT)

    return router


def merged(texts: Mapping[str, str], asked: int) -> str:
    """One text of those of all replicas (name -> text), each metric described once."""
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
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
