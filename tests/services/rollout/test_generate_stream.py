"""Streamed generations: each equals its own request, has its own trace, and its error as a line."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.services.rollout.test_app import PROMPT, Running
from tests.time_limits import ENDS_SOON
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.tracing import Tracing, TracingSettings, inject, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode
from trackway.wire.rollout import GenerateChoice, GeneratePiece, GenerateReply
from trackway.wire.trajectory import Tags

pytestmark = [pytest.mark.anyio, ENDS_SOON]


@pytest.fixture
def settings(model_path: Path) -> RolloutSettings:
    return RolloutSettings(model_path=model_path, model_name="tiny", device="cpu", max_num_seqs=2)


async def pieces(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> list[GeneratePiece]:
    answer = await client.post("/generate_stream", json=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [GeneratePiece.model_validate_json(line) for line in answer.text.splitlines()]


async def test_the_pieces_are_those_of_the_whole_generation(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        whole = GenerateReply.model_validate((await client.post("/generate", json=PROMPT)).json()).choices[0]
        *told, last = await pieces(client, PROMPT)

    joined = GenerateChoice.of(told)
    assert len(told) > 1 and last == GeneratePiece(receipt=last.receipt)
    assert (joined.token_ids, joined.finish_reason) == (whole.token_ids, "length")
    assert joined.weight_versions == whole.weight_versions
    assert joined.token_logprobs == pytest.approx(whole.token_logprobs, abs=1e-5)


async def test_an_error_is_the_last_line(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        [only] = await pieces(client, {**PROMPT, "model": "other"})

    assert only.error is not None and only.error.code is ErrorCode.MODEL_NOT_FOUND


async def test_the_generation_is_in_its_callers_trace_and_counted(running: Running, settings: RolloutSettings) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("rollout", TracingSettings(), exporter)
    headers: dict[str, str] = {}
    tags = Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0)
    with activated(tracing), trajectory_span(tags, "t", "agent", [], record=True):
        inject(headers)
    async with running(create_app(settings, tracing=tracing)) as client:
        *_, last = await pieces(client, PROMPT, **headers)
        lines = (await client.get("/metrics")).text.splitlines()
        tracing.flush(5.0)
        [span] = [span for span in exporter.get_finished_spans() if span.name == "chat tiny"]

    assert span.context is not None and f"{span.context.trace_id:032x}" == headers["traceparent"][3:35]
    assert last.receipt.startswith("bytes=")
    shown = span.attributes or {}
    first, took_ns = shown["gen_ai.response.time_to_first_chunk"], (span.end_time or 0) - (span.start_time or 0)
    assert shown["gen_ai.request.stream"] is True
    assert isinstance(first, float) and 0 < first < took_ns / 1e9
    own = 'gen_ai_operation_name="chat",gen_ai_provider_name="trackway",gen_ai_request_model="tiny"'
    assert f"gen_ai_client_inference_time_to_first_chunk_seconds_count{{{own}}} 1.0" in lines
