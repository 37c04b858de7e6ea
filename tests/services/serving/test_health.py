"""What `/health` says about traces: where they can go, and what became of them."""

import pytest

from trackway.serving import ServiceSettings, service_app
from trackway.serving.app import span_counts
from trackway.tracing import BackendStats, SpanStats, Tracing, TracingSettings
from trackway.tracing.span_handle import activated
from trackway.tracing.spans import root_span
from trackway.wire.service import Health, SpanCounts
from trackway.wire.trajectory import TraceBackend, TraceTarget

pytestmark = pytest.mark.anyio


async def test_health_names_the_backends_that_lack_nothing_and_no_secret(running) -> None:
    tracing = TracingSettings.model_validate(
        {"mlflow_uri": None, "weave_api_key": "secret", "otlp_endpoint": "http://127.0.0.1:9"}
    )
    async with running(service_app("tools", ServiceSettings(tracing=tracing), routers=[])) as client:
        answer = await client.get("/health")

    assert answer.json()["trace_backends"] == ["weave", "otlp"]
    assert "secret" not in answer.text


async def test_health_counts_the_spans_of_its_process(running) -> None:
    settings = TracingSettings.model_validate({"mlflow_uri": None, "weave_api_key": None, "otlp_endpoint": None})
    tracing = Tracing("tools", settings)
    app = service_app("tools", ServiceSettings(tracing=settings), routers=[], tracing=tracing)
    with activated(tracing):
        for backends in ((), (TraceBackend.WEAVE,)):
            with root_span("work", {}, {}, True, TraceTarget(backends=backends)):
                pass
    assert tracing.flush(5)

    async with running(app) as client:
        health = Health.model_validate_json((await client.get("/health")).content)

    assert (health.trace_backends, health.spans) == ([], SpanCounts(ended=2, dropped=1))


def test_the_counts_of_a_process_are_the_sums_over_its_backends() -> None:
    stats = SpanStats(
        ended=9,
        dropped=1,
        queued=5,
        backends={
            "mlflow": BackendStats(exported=5, refused=1, dropped=2, waiting=3, spool_bytes=70),
            "weave": BackendStats(exported=4, refused=2, dropped=0, waiting=1, spool_bytes=7),
        },
    )

    assert span_counts(stats) == SpanCounts(ended=9, exported=9, dropped=3, refused=3, waiting=9, spool_bytes=77)
