"""Batches of generations: each equals its own request, has its own error and trace, and counts as load."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Gauge

from tests.services.rollout.test_app import Running
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.serving.middleware import BatchLoad, run_batch
from trackway.tracing import Tracing, TracingSettings, inject, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateChoice, GenerateReply, GenerateRequest
from trackway.wire.service import BatchEntry, BatchResult
from trackway.wire.trajectory import Tags

pytestmark = [pytest.mark.anyio, ENDS_SOON]


@pytest.fixture
def settings(model_path: Path, tmp_path: Path) -> RolloutSettings:
    return RolloutSettings(
        model_path=model_path, model_name="tiny", weights_url=str(tmp_path), device="cpu", max_num_seqs=8
    )


def request(number: int, prompt: int = 11, **given: Any) -> dict[str, Any]:
    params = {"max_tokens": 3 + number, "seed": number, "ignore_eos": True}
    return {"request_id": f"r{number}", "token_ids": [prompt, 12, 13], "sampling_params": params, **given}


def entries(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"entries": [{"request": body} for body in requests]}


def results(answer: httpx.Response) -> dict[int, BatchResult[GenerateReply]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    read = [BatchResult[GenerateReply].model_validate_json(line) for line in answer.text.splitlines()]
    by_index = {result.index: result for result in read}
    assert len(by_index) == len(read)
    return by_index


def logprobs(choice: GenerateChoice) -> list[float]:
    return choice.token_logprobs


async def test_each_generation_equals_its_own_request(running: Running, settings: RolloutSettings) -> None:
    requests = [request(0), request(1), request(2, prompt=14), request(1)]
    async with running(create_app(settings)) as client:
        alone = [GenerateReply.model_validate((await client.post("/generate", json=body)).json()) for body in requests]
        batch = results(await client.post("/generate_batch", json=entries(*requests)))
    replies = [reply for index in range(4) if (reply := batch[index].reply)]
    assert [(reply.request_id, reply.usage) for reply in replies] == [
        (reply.request_id, reply.usage) for reply in alone
    ]
    choices = [reply.choices[0] for reply in replies]
    expected = [reply.choices[0] for reply in alone]
    assert [choice.token_ids for choice in choices] == [choice.token_ids for choice in expected]
    assert [logprobs(choice) for choice in choices] == [
        pytest.approx(logprobs(choice), abs=1e-5) for choice in expected
    ]
    assert len({str(choice.token_ids) for choice in expected}) == 3


async def test_an_error_is_that_of_its_own_entry(running: Running, settings: RolloutSettings) -> None:
    requests = [request(0), request(1, model="other"), request(2, token_ids=[99_999_999])]
    async with running(create_app(settings)) as client:
        batch = results(await client.post("/generate_batch", json=entries(*requests)))
    codes = [error and error.code for error in (batch[index].error for index in range(3))]
    assert codes == [None, ErrorCode.MODEL_NOT_FOUND, ErrorCode.INVALID_REQUEST]
    assert [batch[index].reply is None for index in range(3)] == [False, True, True]


@pytest.mark.parametrize("body", [{"entries": []}, entries(*[request(0)] * 65), {"entries": [{"request": {}}]}])
async def test_a_batch_of_another_shape_is_refused(
    running: Running, settings: RolloutSettings, body: dict[str, Any]
) -> None:
    async with running(create_app(settings)) as client:
        answer = await client.post("/generate_batch", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")


async def test_each_generation_is_in_its_own_trace(running: Running, settings: RolloutSettings) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("rollout", TracingSettings(), exporter)
    carried: list[dict[str, str]] = [{}, {}]
    for rollout_n, headers in enumerate(carried):
        tags = Tags(experiment_name="e", step=1, sample_index=0, rollout_n=rollout_n)
        with activated(tracing), trajectory_span(tags, "t", "agent", [], record=True):
            inject(headers)
    body = {"entries": [{"request": request(n), "trace": headers} for n, headers in enumerate(carried)]}
    async with running(create_app(settings, tracing=tracing)) as client:
        batch = results(await client.post("/generate_batch", json=body))
        tracing.flush(5.0)
        spans = [span for span in exporter.get_finished_spans() if span.name == "chat tiny"]
    parents = {f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" for span in spans if span.parent}
    assert parents == {headers["traceparent"][3:52] for headers in carried} and len(parents) == 2
    assert all(batch[index].receipt.startswith("bytes=") for index in range(2))


class Slots:
    """Generations that end, or fail, when the test says so; stands for the service's engine."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[GenerateReply]] = {}
        self.aborted: list[str] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        name = str(request.request_id)
        self.running[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[name]
        except asyncio.CancelledError:
            self.aborted.append(name)
            raise

    def batch(self, count: int, load: BatchLoad) -> AsyncGenerator[str, None]:
        requests = [GenerateRequest(request_id=f"r{n}", token_ids=[1]) for n in range(count)]
        return run_batch(self.generate, [BatchEntry(request=request) for request in requests], load)

    def end(self, name: str) -> None:
        usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
        fields = {"request_id": name, "model": "m", "created": 0, "usage": usage, "choices": []}
        self.running[name].set_result(GenerateReply.model_validate(fields))


async def test_results_come_as_they_end_and_unfinished_entries_count_as_load() -> None:
    gauge = Gauge("requests", "in progress", registry=None)
    slots, load, seen = Slots(), BatchLoad(gauge), []
    batch = slots.batch(3, load)
    async with aclosing(batch):
        for name in ("r1", "r0", "r2"):
            line = asyncio.ensure_future(anext(batch))
            await async_until(lambda: len(slots.running) >= 3)
            seen.append(load.extra)
            assert gauge._value.get() == load.extra
            slots.end(name)
            seen.append(BatchResult[GenerateReply].model_validate_json(await line).index)
        with pytest.raises(StopAsyncIteration):
            await anext(batch)
    assert (seen, load.extra, gauge._value.get()) == ([2, 1, 1, 0, 0, 2], 0, 0)


async def test_closing_the_answer_aborts_what_still_runs() -> None:
    slots, load = Slots(), BatchLoad()
    batch = slots.batch(3, load)
    line = asyncio.ensure_future(anext(batch))
    await async_until(lambda: len(slots.running) >= 3)
    slots.end("r1")
    await line
    await batch.aclose()
    assert (sorted(slots.aborted), load.extra) == (["r0", "r2"], 0)


async def test_a_defect_is_the_error_of_its_entry(caplog: pytest.LogCaptureFixture) -> None:
    slots = Slots()
    batch = slots.batch(2, BatchLoad())
    line = asyncio.ensure_future(anext(batch))
    await async_until(lambda: len(slots.running) >= 2)
    slots.running["r0"].set_exception(ValueError("no vocabulary"))
    slots.running["r1"].set_exception(TrackwayError(ErrorCode.OVERLOADED, "full"))
    errors = [BatchResult[GenerateReply].model_validate_json(text).error for text in (await line).splitlines()]
    assert [(error.code, error.retryable) for error in errors if error] == [
        (ErrorCode.INTERNAL, False),
        (ErrorCode.OVERLOADED, True),
    ]
    assert "no vocabulary" in caplog.text
    await batch.aclose()
