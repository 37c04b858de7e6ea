"""Half of a character, which Python's text can hold and UTF-8 cannot, costs no call: it becomes U+FFFD, or a 422."""

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.reward.app import create_app as create_reward
from trackway.tools import ToolInputError, ToolResult, function_tool
from trackway.tools.app import create_app
from trackway.tools.functions import FunctionTool
from trackway.tracing import Tracing, TracingSettings
from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward

pytestmark = pytest.mark.anyio

HALF, SHOWN = "half \ud83d", "half \ufffd"
RECORDED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def giving(kind: str) -> object:
    """A tool of a user's.

    Args:
        kind: What to do.
    """
    if kind == "raise":
        raise RuntimeError(HALF)
    if kind == "refuse":
        raise ToolInputError(HALF, tool=HALF)
    returned: dict[str, object] = {
        "text": HALF,
        "json": {"key " + HALF: [HALF]},
        "metrics": (HALF, 1.0, {HALF: 2.0}),
        "result": ToolResult(text=HALF, metrics={"plain": 1.0}),
    }
    return returned[kind]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.mark.parametrize(
    ("kind", "status", "told"),
    [
        ("text", 200, SHOWN),
        ("json", 200, f'{{"key {SHOWN}":["{SHOWN}"]}}'),
        ("metrics", 200, SHOWN),
        ("result", 200, SHOWN),
        ("raise", 500, f"tool 'giving' failed in execute: RuntimeError: {SHOWN}"),
        ("refuse", 422, SHOWN),
    ],
)
async def test_a_tools_text(
    running,
    exporter: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    status: int,
    told: str,
) -> None:
    tracing = Tracing("tools", TracingSettings(schedule_delay_s=0.01), exporter)
    app = create_app(tools=[FunctionTool(function_tool(giving))], tracing=tracing)
    async with running(app) as client:
        body = {"arguments": {"kind": kind}}
        answer = await client.post("/tools/giving/execute", json=body, headers=RECORDED)
        tracing.flush(5)
    result: dict[str, Any] = answer.json()

    assert answer.status_code == status
    if status == 200:
        assert result["text"] == told
        assert (result["metrics"].get(SHOWN) == 2.0) is (kind == "metrics")
    else:
        assert result["error"]["message"].startswith(told)
    spans = exporter.get_finished_spans()
    assert len(spans) == 1
    assert b"half" in encode_spans(spans).SerializeToString()
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


class Halves:
    """Scores with half a character in whatever it says."""

    info = ScorerInfo(name="halves", data_sources=["halves"], methods=["only"], description="")

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        if request.solution_str == "raise":
            raise ValueError(HALF)
        return Reward(score=1.0, components={HALF: 0.5})


@pytest.mark.parametrize("kind", ["raise", "score"])
async def test_a_scorers_text(running, kind: str) -> None:
    async with running(create_reward(scorers=[Halves()])) as client:
        body = {"data_source": "halves", "solution_str": kind, "ground_truth": "1"}
        answer = await client.post("/score", json=body)

    if kind == "raise":
        assert answer.status_code == 500
        assert f"scorer 'halves' failed: ValueError: {SHOWN}" in answer.json()["error"]["message"]
    else:
        assert answer.json() == {"score": 1.0, "components": {SHOWN: 0.5}}


@pytest.mark.parametrize("text", [b'"\\ud83d"', b'"\\udc00\\ud83d"', b'"\xed\xa0\xbd"'])
async def test_a_body_with_half_a_character_is_refused(running, text: bytes) -> None:
    async with running(create_app(tools=[FunctionTool(function_tool(giving))])) as client:
        for content in (b'{"arguments": {"kind": %s}}' % text, b'{"arguments": {%s: "text"}}' % text):
            headers = {"content-type": "application/json"}
            answer = await client.post("/tools/giving/execute", content=content, headers=headers)

            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
