"""What became of the spans of every process, as differences over a run; services answer over real sockets."""

from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI

from trackway.serving import ServiceSettings, service_app
from trackway.tracing import Tracing, TracingSettings, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.trainer.traces import run
from trackway.trainer.traces.run import SpanAccounts
from trackway.wire.service import Health, Ready, ReplicaInfo, ReplicaList, SpanCounts
from trackway.wire.trainer import TraceSummary
from trackway.wire.trajectory import Tags, TraceBackend, TraceTarget

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_http")]

ELSEWHERE = TraceTarget(backends=(TraceBackend.WEAVE,))
"""A backend that the service under test knows nothing of."""


@dataclass
class Replicas:
    """A service under Serve: its replicas by name, each with its counts."""

    counts: dict[str, SpanCounts] = field(default_factory=dict)
    asked: int = 0
    settles_after: int | None = None

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/replicas")
        async def replicas() -> ReplicaList:
            self.asked += 1
            if self.settles_after is not None and self.asked > self.settles_after:
                self.counts = {name: counts.model_copy(update={"waiting": 0}) for name, counts in self.counts.items()}
            return ReplicaList(replicas=[replica(name, spans) for name, spans in self.counts.items()])

        return app


def replica(name: str, spans: SpanCounts) -> ReplicaInfo:
    health = Health(service="agent", replica=name, pid=1, python="", executable="", spans=spans)
    return ReplicaInfo(health=health, ready=Ready(ready=True))


def accounts(urls: dict[str, str], own: SpanCounts | None = None, earlier: TraceSummary | None = None) -> SpanAccounts:
    return SpanAccounts(urls, lambda: own or SpanCounts(), earlier)


async def test_losses_count_from_the_start_of_the_run_and_include_new_and_vanished_replicas(serving):
    service = Replicas({"a": SpanCounts(dropped=5, refused=1), "b": SpanCounts(dropped=2)})
    with serving(service.app()) as url:
        made = accounts({"agent": url}, own=SpanCounts(dropped=100, refused=10, waiting=1, spool_bytes=7))
        await made.open()
        service.counts["a"] = SpanCounts(dropped=6, refused=3, waiting=50, spool_bytes=900)
        await made.settle(0)
        service.counts = {"b": SpanCounts(dropped=2, waiting=4, spool_bytes=80), "c": SpanCounts(refused=20)}
        await made.settle(0)

    assert made.summary(trajectories=3, size=70) == TraceSummary(
        trajectories=3,
        bytes=70,
        spans_dropped=101,
        spans_refused=32,
        spans_waiting=5,
        spool_bytes=87,
    )


async def test_a_resumed_run_adds_to_what_it_had(serving):
    earlier = TraceSummary(trajectories=4, bytes=30, spans_dropped=2, spans_refused=1, spans_waiting=9, unknown=["x"])
    service = Replicas({"a": SpanCounts(dropped=50)})
    with serving(service.app()) as url:
        made = accounts({"agent": url}, earlier=earlier)
        await made.open()

    assert made.summary(1, 5) == TraceSummary(trajectories=5, bytes=35, spans_dropped=2, spans_refused=1)


async def test_settling_ends_when_nothing_waits(serving):
    service = Replicas({"a": SpanCounts(waiting=3)}, settles_after=3)
    with serving(service.app()) as url:
        made = accounts({"agent": url})
        await made.open()
        await made.settle(30)

    assert (service.asked, made.summary().spans_waiting) == (4, 0)


async def test_settling_ends_at_its_deadline(serving):
    service = Replicas({"a": SpanCounts(waiting=3)})
    with serving(service.app()) as url:
        made = accounts({"agent": url})
        await made.open()
        await made.settle(0.1)

    assert made.summary().spans_waiting == 3


async def test_looks_during_a_run_are_rare_and_nobody_waits_for_them(serving, monkeypatch):
    service = Replicas({"a": SpanCounts()})
    with serving(service.app()) as url:
        made = accounts({"agent": url})
        await made.open()
        for _ in range(5):
            made.refresh()
        await made.settle(0)
        often = service.asked
        monkeypatch.setattr(run, "QUERY_INTERVAL_S", 0.0)
        service.counts["a"] = SpanCounts(dropped=1)
        made.refresh()
        before = made.summary().spans_dropped
        await made.settle(0)

    assert (often, before, made.summary().spans_dropped) == (2, 0, 1)


async def test_a_service_alone_is_asked_by_its_health_and_one_that_is_away_is_named(serving):
    tracing = Tracing("tools", TracingSettings(mlflow_uri=None, weave_api_key=None))
    with serving(service_app("tools", ServiceSettings(), routers=[], tracing=tracing)) as url:
        made = accounts({"tools": url, "reward": "http://127.0.0.1:9"})
        await made.open()
        tags = Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0)
        with activated(tracing), trajectory_span(tags, "i", "a", [], True, ELSEWHERE):
            pass
        assert tracing.flush(5)
        await made.settle(0)

    assert made.summary() == TraceSummary(spans_dropped=1, unknown=["reward"])
