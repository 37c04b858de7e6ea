"""What every service's app has in common."""

import asyncio
import sys
import time
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from tests.time_limits import ENDS_SOON
from trackway.clients import Deadline
from trackway.serving import Gauge, ServiceSettings, service_app
from trackway.tracing import Tracing, TracingSettings, inject, tool_span
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.service import Ready

pytestmark = pytest.mark.anyio


class Number(BaseModel):
    value: int


class Counter:
    """A service that counts how often it really ran."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.router = APIRouter()
        self.router.add_api_route("/add", self.add, methods=["POST"])
        self.router.add_api_route("/fail", self.fail, methods=["POST"])
        self.router.add_api_route("/conflict", self.conflict, methods=["POST"])

    async def add(self, number: Number) -> Number:
        await self.gate.wait()
        self.runs += 1
        return Number(value=number.value + self.runs)

    async def fail(self, how: str = "") -> None:
        if how == "exit":
            sys.exit(5)
        if how == "cancel":
            raise asyncio.CancelledError
        raise ZeroDivisionError("by hand")

    async def conflict(self) -> None:
        self.runs += 1
        raise TrackwayError(ErrorCode.WEIGHTS_BEHIND, "expected version 3, got 2; wait", have=2, want=3)


def app_of(counter: Counter, **settings: object) -> FastAPI:
    return service_app("counter", ServiceSettings.model_validate(settings), routers=[counter.router])


def error_code(response: httpx.Response) -> str:
    return ErrorReply.model_validate_json(response.content).error.code.value


async def test_an_error_of_ours_is_answered_with_its_status_and_detail(running) -> None:
    async with running(app_of(Counter())) as client:
        response = await client.post("/conflict")
    assert response.status_code == 409
    assert response.json()["error"] == {
        "code": "weights_behind",
        "message": "expected version 3, got 2; wait",
        "retryable": True,
        "detail": {"have": 2, "want": 3},
    }


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (TrackwayError(ErrorCode.OVERLOADED, "full", retry_after_s=0.3), "1"),
        (TrackwayError(ErrorCode.OVERLOADED, "full", retry_after_s=2.0), "2"),
        (TrackwayError(ErrorCode.OVERLOADED, "full"), "1"),
        (TrackwayError(ErrorCode.PAUSED, "paused", retry_after_s=7.2), "8"),
        (TrackwayError(ErrorCode.WEIGHTS_BEHIND, "behind", retry_after_s=0), "0"),
        (TrackwayError(ErrorCode.PAUSED, "paused"), None),
        (TrackwayError(ErrorCode.INTERNAL, "broken"), None),
    ],
)
async def test_a_refusal_says_in_whole_seconds_when_to_come_again(
    running, error: TrackwayError, header: str | None
) -> None:
    router = APIRouter()

    @router.post("/refuse")
    async def refuse() -> None:
        raise error

    async with running(service_app("counter", ServiceSettings(), routers=[router])) as client:
        response = await client.post("/refuse")
    assert (response.status_code, response.headers.get("retry-after")) == (error.status, header)
    assert response.json()["error"]["detail"] == error.detail


async def test_an_unexpected_exception_is_a_500_with_our_body(running) -> None:
    async with running(app_of(Counter())) as client:
        response = await client.post("/fail")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "ZeroDivisionError: by hand" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("how", "headers", "what"),
    [
        ("exit", {}, "it called sys.exit(5)"),
        ("exit", {"idempotency-key": "k"}, "it called sys.exit(5)"),
        ("cancel", {}, "it cancelled itself"),
    ],
)
async def test_what_is_no_exception_is_a_500_with_our_body_too(
    running, how: str, headers: dict[str, str], what: str
) -> None:
    async with running(app_of(Counter())) as client:
        response = await client.post("/fail", params={"how": how}, headers=headers)
    assert response.status_code == 500
    assert ErrorReply.model_validate_json(response.content).error.message.startswith(f"{what}; this is a bug")


async def test_a_full_disk_is_no_defect_of_the_service_whatever_was_being_written(running, small_disk: Path) -> None:
    router = APIRouter()

    @router.post("/write")
    async def write() -> None:
        (small_disk / "file").write_bytes(bytes(2_000_000))

    async with running(service_app("counter", ServiceSettings(), routers=[router])) as client:
        response = await client.post("/write")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["detail"]["reason"]) == (507, "disk_full", "ENOSPC")


async def test_a_body_that_does_not_fit_names_the_field(running) -> None:
    async with running(app_of(Counter())) as client:
        response = await client.post("/add", json={"value": "many"})
    assert (response.status_code, error_code(response)) == (422, "invalid_request")
    assert "body.value" in response.json()["error"]["message"]


async def test_an_unknown_path_is_a_404_with_our_body(running) -> None:
    async with running(app_of(Counter())) as client:
        response = await client.get("/nowhere")
    assert (response.status_code, error_code(response)) == (404, "not_found")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(running, chunked: bool) -> None:
    body = b'{"value": 1' + b" " * 5000 + b"}"

    async def chunks():
        yield body[:100]
        yield body[100:]

    async with running(app_of(Counter(), max_body_bytes=1024)) as client:
        response = await client.post("/add", content=chunks() if chunked else body)
    assert (response.status_code, error_code(response)) == (413, "payload_too_large")


async def test_a_repeated_key_is_answered_from_the_first_run(running) -> None:
    counter = Counter()
    async with running(app_of(counter)) as client:
        first = await client.post("/add", json={"value": 10}, headers={"idempotency-key": "a"})
        again = await client.post("/add", json={"value": 10}, headers={"idempotency-key": "a"})
        other_reply = await client.post("/add", json={"value": 10}, headers={"idempotency-key": "b"})
    assert [first.json()["value"], again.json()["value"], other_reply.json()["value"]] == [11, 11, 12]


async def test_a_key_under_another_body_is_a_conflict(running) -> None:
    async with running(app_of(Counter())) as client:
        await client.post("/add", json={"value": 10}, headers={"idempotency-key": "a"})
        response = await client.post("/add", json={"value": 11}, headers={"idempotency-key": "a"})
    assert (response.status_code, error_code(response)) == (409, "conflict")


async def test_a_retryable_failure_is_not_kept(running) -> None:
    counter = Counter()
    async with running(app_of(counter)) as client:
        for _ in range(2):
            await client.post("/conflict", headers={"idempotency-key": "a"})
    assert counter.runs == 2


async def test_keyed_work_goes_on_when_its_client_leaves(running) -> None:
    counter = Counter()
    counter.gate.clear()
    async with running(app_of(counter)) as client:
        leaving = asyncio.create_task(client.post("/add", json={"value": 1}, headers={"idempotency-key": "a"}))
        await asyncio.sleep(0)
        while not leaving.cancelled() and not leaving.done():
            leaving.cancel()
            await asyncio.sleep(0)
        again = asyncio.create_task(client.post("/add", json={"value": 1}, headers={"idempotency-key": "a"}))
        counter.gate.set()
        response = await asyncio.wait_for(again, 60)
    assert (response.json()["value"], counter.runs) == (2, 1)


@ENDS_SOON
async def test_the_callers_deadline_ends_the_work_with_a_504(running) -> None:
    counter = Counter()
    counter.gate.clear()
    async with running(app_of(counter)) as client:
        headers = {"x-request-timeout": "0.05"}
        response = await client.post("/add", json={"value": 1}, headers=headers)
    assert (response.status_code, error_code(response)) == (504, "deadline_exceeded")


async def test_a_callers_clock_an_hour_off_changes_nothing(running, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(app_of(Counter())) as client:
        deadline, now = Deadline.after(5.0), time.time()
        monkeypatch.setattr("time.time", lambda: now + 3600)
        headers = {"x-request-timeout": f"{deadline.remaining:.3f}"}
        response = await client.post("/add", json={"value": 1}, headers=headers)
    assert response.status_code == 200


async def test_health_names_the_interpreter_and_ready_names_the_reason(running) -> None:
    async def not_yet() -> Ready:
        return Ready(ready=False, reason="still loading")

    app = service_app("counter", ServiceSettings(), routers=[], ready=not_yet)
    async with running(app) as client:
        health, ready = await client.get("/health"), await client.get("/ready")
    assert health.json()["versions"]["trackway"] and health.json()["service"] == "counter"
    assert (ready.status_code, ready.json()["reason"]) == (503, "still loading")


async def test_metrics_count_requests_by_route_and_status(running) -> None:
    async with running(app_of(Counter())) as client:
        await client.post("/add", json={"value": 1})
        text = (await client.get("/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith("trackway_requests_total{")]
    assert 'route="/add"' in line and 'status="200"' in line and line.endswith(" 1.0")


@pytest.mark.parametrize("path", ["/health", "/nowhere"])
async def test_each_answer_names_its_replica(running, path: str) -> None:
    async with running(app_of(Counter(), replica="abcd")) as client:
        assert (await client.get(path)).headers["x-trackway-replica"] == "abcd"


async def test_a_services_own_numbers_are_shown_once_there_are_any(running) -> None:
    def not_yet() -> float:
        raise TrackwayError(ErrorCode.UNAVAILABLE, "starting")

    gauges = [
        Gauge("own_now", "Now", lambda: 3),
        Gauge("own_ever", "Ever", lambda: 12, total=True),
        Gauge("own_later", "Later", not_yet),
    ]
    async with running(service_app("counter", ServiceSettings(), routers=[], gauges=gauges)) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    shown = [line for line in lines if line.startswith("own_")]
    assert shown == ["own_now 3.0", "own_ever_total 12.0"]


async def test_a_request_continues_the_callers_trace_and_a_direct_one_leaves_none(running) -> None:
    exporter = InMemorySpanExporter()
    router = APIRouter()

    @router.post("/work")
    async def work() -> None:
        with tool_span("t", {}, None):
            pass

    tracing = Tracing("counter", TracingSettings(schedule_delay_s=0.01), exporter)
    app = service_app("counter", ServiceSettings(), routers=[router], tracing=tracing)
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with running(app) as client:
        await client.post("/work")
        await client.post("/work", headers={"traceparent": f"00-{trace_id}-{parent}-00"})
        await client.post("/work", headers={"traceparent": f"00-{trace_id}-{parent}-01"})
        tracing.flush(5)
        [span] = exporter.get_finished_spans()
    assert format(span.get_span_context().trace_id, "032x") == trace_id
    assert span.parent is not None and format(span.parent.span_id, "016x") == parent


async def test_a_trace_context_in_several_header_lines_is_continued_whole(running) -> None:
    router = APIRouter()

    @router.post("/work")
    async def work() -> dict[str, str]:
        headers: dict[str, str] = {}
        inject(headers)
        return headers

    lines = [
        ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
        ("tracestate", "one=1"),
        ("tracestate", "two=2,three=3"),
        ("baggage", "a=1"),
        ("baggage", "b=2"),
    ]
    async with running(service_app("counter", ServiceSettings(), routers=[router])) as client:
        answer = (await client.post("/work", headers=lines)).json()

    assert answer["tracestate"] == "one=1,two=2,three=3"
    assert sorted(answer["baggage"].split(",")) == ["a=1", "b=2"]


async def test_fastapi_records_no_telemetry_of_its_own_where_the_process_has_providers(
    running, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    traces = TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces)

    async with running(app_of(Counter())) as client:
        assert (await client.get("/health")).status_code == 200

    assert (reader.get_metrics_data(), spans.get_finished_spans()) == (None, ())
