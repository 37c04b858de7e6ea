"""What a service tells its caller of the spans and incidents that a request added to the caller's trace."""

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.serving import ServiceSettings, service_app
from trackway.tracing import Tracing, TracingSettings, add_incident, tool_span
from trackway.tracing.export.otlp import weight
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Incident

pytestmark = pytest.mark.anyio

RECEIPT = "x-trackway-trace"
RECORDED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


class Worker:
    """A service whose every piece of work is a span with an incident, however it ends."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing("worker", TracingSettings(schedule_delay_s=0.01), self.exporter)
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        router = APIRouter()
        router.add_api_route("/work", self.work, methods=["POST"])
        router.add_api_route("/idle", self.idle, methods=["POST"])
        router.add_api_route("/stream", self.stream, methods=["POST"], response_model=None)
        self.app: FastAPI = service_app("worker", ServiceSettings(), routers=[router], tracing=self.tracing)

    async def work(self, how: str = "ok") -> int:
        with tool_span("hammer", {"secret": "5551234"}, None):
            self.runs += 1
            add_incident(Incident.TOOL_TIMEOUT)
            await self.gate.wait()
            if how == "raise":
                raise ZeroDivisionError("by hand")
            if how == "refuse":
                raise TrackwayError(ErrorCode.WEIGHTS_BEHIND, "expected version 3, got 2; wait")
        return self.runs

    async def idle(self) -> None: ...

    async def stream(self) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            with tool_span("hammer", {}, None):
                yield "line\n"

        return StreamingResponse(lines())

    def weighed(self) -> int:
        """Bytes of all spans."""
        assert self.tracing.flush(5)
        return sum(weight(span) for span in self.exporter.get_finished_spans())


@pytest.fixture
def worker() -> Worker:
    return Worker()


async def test_the_receipt_weighs_the_spans_and_names_the_incidents(running, worker: Worker) -> None:
    async with running(worker.app) as client:
        answer = await client.post("/work", headers=RECORDED)
        weighed = worker.weighed()
    assert answer.headers[RECEIPT] == f"bytes={weighed},incidents=tool_timeout"
    assert weighed > 0


@ENDS_SOON
@pytest.mark.parametrize(("how", "status"), [("refuse", 409), ("raise", 500), ("late", 504)])
@pytest.mark.parametrize("key", [{}, {"idempotency-key": "a"}], ids=["without a key", "with a key"])
async def test_an_error_answer_carries_it_too(
    running, worker: Worker, how: str, status: int, key: dict[str, str]
) -> None:
    headers = {**RECORDED, **key}
    if how == "late":
        worker.gate.clear()
        headers["x-request-timeout"] = "0.05"
    async with running(worker.app) as client:
        answer = await client.post(f"/work?how={how}", headers=headers)
        weighed = worker.weighed()
    assert (answer.status_code, answer.headers[RECEIPT]) == (status, f"bytes={weighed},incidents=tool_timeout")


async def test_incidents_are_told_where_nothing_is_recorded(running, worker: Worker) -> None:
    async with running(worker.app) as client:
        answer = await client.post("/work")
    assert (answer.headers[RECEIPT], worker.weighed()) == ("incidents=tool_timeout", 0)


@pytest.mark.parametrize("path", ["/idle", "/health", "/nowhere"])
async def test_without_anything_to_tell_there_is_no_receipt(running, worker: Worker, path: str) -> None:
    async with running(worker.app) as client:
        answer = await (client.get if path == "/health" else client.post)(path, headers=RECORDED)
    assert RECEIPT not in answer.headers


async def test_a_streamed_answer_has_none(running, worker: Worker) -> None:
    async with running(worker.app) as client:
        answer = await client.post("/stream", headers=RECORDED)
    assert (answer.text, RECEIPT in answer.headers) == ("line\n", False)


async def test_a_receipt_says_nothing_but_numbers_and_names(running, worker: Worker) -> None:
    async with running(worker.app) as client:
        answer = await client.post("/work", headers=RECORDED)
    assert re.fullmatch(r"bytes=\d+,incidents=[a-z_+]+", answer.headers[RECEIPT])


async def test_a_repeated_answer_carries_the_receipt_of_the_run_that_made_it(running, worker: Worker) -> None:
    headers = {**RECORDED, "idempotency-key": "a"}
    async with running(worker.app) as client:
        first = await client.post("/work", headers=headers)
        again = await client.post("/work", headers=headers)
    assert (first.headers[RECEIPT], worker.runs) == (again.headers[RECEIPT], 1)
    assert again.headers.get_list(RECEIPT) == [again.headers[RECEIPT]]


@pytest.mark.parametrize(("how", "status"), [("ok", 200), ("raise", 500)])
async def test_who_asks_again_because_the_first_answer_was_lost_gets_its_receipt(
    running, worker: Worker, how: str, status: int
) -> None:
    headers = {**RECORDED, "idempotency-key": "a"}
    worker.gate.clear()
    async with running(worker.app) as client:
        leaving = asyncio.create_task(client.post(f"/work?how={how}", headers=headers))
        await async_until(lambda: worker.runs)
        leaving.cancel()
        await asyncio.wait([leaving])
        worker.gate.set()
        again: httpx.Response = await client.post(f"/work?how={how}", headers=headers)
        weighed = worker.weighed()
    assert (again.status_code, worker.runs) == (status, 1)
    assert again.headers[RECEIPT] == f"bytes={weighed},incidents=tool_timeout"


async def test_a_refused_repetition_has_no_receipt_of_somebody_elses_work(running, worker: Worker) -> None:
    async with running(worker.app) as client:
        await client.post("/work", headers={**RECORDED, "idempotency-key": "a"})
        other_reply = await client.post("/work", json={}, headers={**RECORDED, "idempotency-key": "a"})
    assert (other_reply.status_code, RECEIPT in other_reply.headers) == (409, False)
