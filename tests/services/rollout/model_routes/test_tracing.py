"""A generation through OpenAI's routes is a span of the caller's trace, as one through our own is."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import CHAT
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.tracing import Tracing, TracingSettings, inject, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.trajectory import Tags

pytestmark = pytest.mark.anyio


class Running(Protocol):
    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]: ...


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}, {"stop": "k"}, {"stop": "k", "stream": True}]
)
async def test_each_choice_is_a_span_with_its_counts(
    running: Running,
    exporter: InMemorySpanExporter,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
    fields: Mapping[str, object],
) -> None:
    engine = ScriptedEngine()
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine.ends = "length"
    settings = RolloutSettings(model_path=Path(tokenizer.name_or_path), model_name="tiny")
    tracing = Tracing("rollout", TracingSettings(), exporter)
    headers: dict[str, str] = {}
    tags = Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0)
    with activated(tracing), trajectory_span(tags, "t", "agent", [], record=True):
        inject(headers)
    async with running(create_app(settings, engine, tracing)) as client:
        body = {"model": "tiny", "messages": CHAT, **fields}
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        tracing.flush(5.0)
    root, *spans = sorted(exporter.get_finished_spans(), key=lambda span: span.name == "chat tiny")
    shown = [(span.attributes or {}).get("gen_ai.usage.output_tokens") for span in spans]
    made = 1 if "stop" in fields else 2  # the first token holds the stop string
    assert shown == [made] * (2 if "n" in fields else 1)
    reasons = [(span.attributes or {}).get("gen_ai.response.finish_reasons") for span in spans]
    assert reasons == [("stop" if "stop" in fields else "length",)] * len(spans)
    assert [span.status.status_code.name for span in spans] == ["UNSET"] * len(spans)
    assert {span.parent.span_id for span in spans if span.parent} == {root.context.span_id}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
