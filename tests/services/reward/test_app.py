"""The reward service over HTTP."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.time_limits import ENDS_SOON
from trackway.clients.reward import RewardClient
from trackway.reward.app import create_app
from trackway.reward.settings import RewardSettings
from trackway.tracing import Tracing, TracingSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest

pytestmark = pytest.mark.anyio

Run = Callable[[FastAPI], AbstractAsyncContextManager[httpx.AsyncClient]]
RECORDED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def app_of(tracing: Tracing | None = None) -> FastAPI:
    settings = RewardSettings(
        extra_scorers=["tests.services.reward.shouting_scorer:ShoutingScorer"], score_timeout_s=0.05
    )
    return create_app(settings, tracing=tracing)


def asked(text: str, method: str | None = None, source: str = "openai/gsm8k") -> ScoreRequest:
    return ScoreRequest(data_source=source, solution_str=text, ground_truth="18", method=method)


async def test_a_solution_is_scored_strictly_unless_asked_otherwise(running: Run) -> None:
    async with running(app_of()) as http:
        client = RewardClient("http://reward", http)
        scores = [(await client.score(asked("####18", method))).score for method in (None, "strict", "flexible")]

    assert scores == [0.0, 0.0, 1.0]


@ENDS_SOON
@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (asked("1", source="openai/math"), ErrorCode.UNKNOWN_DATA_SOURCE, "openai/gsm8k, test/shouting, trackway/tiny"),
        (asked("1", "lenient"), ErrorCode.INVALID_REQUEST, "methods strict, flexible, normalized, got 'lenient'"),
        (asked("a", "raise", "test/shouting"), ErrorCode.INTERNAL, "'shouting' failed: LookupError: asked to fail ("),
        (asked("a", "sleep", "test/shouting"), ErrorCode.DEADLINE_EXCEEDED, "expected a score within 0.05 s"),
        (asked("a", "nan", "test/shouting"), ErrorCode.INTERNAL, "expected finite scores"),
        (asked("a", "many", "test/shouting"), ErrorCode.INTERNAL, "expected at most 128 components, got 129"),
    ],
)
async def test_an_error_says_what_to_do(running: Run, request_: ScoreRequest, code: ErrorCode, message: str) -> None:
    async with running(app_of()) as http:
        client = RewardClient("http://reward", http)
        with pytest.raises(TrackwayError) as alone:
            await client.score(request_)

    assert alone.value.code == code
    assert message in alone.value.message


async def test_scorers_are_listed_with_the_default_method_first(running: Run) -> None:
    async with running(app_of()) as http:
        scorers = await RewardClient("http://reward", http).scorers()

    assert [(scorer.name, scorer.methods[0]) for scorer in scorers] == [("gsm8k", "strict"), ("shouting", "share")]
    assert scorers[0].data_sources == ["openai/gsm8k", "trackway/tiny_math"]


async def test_a_score_is_a_span_with_its_components_and_the_end_of_the_text(running: Run) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("reward", TracingSettings(), exporter)
    async with running(app_of(tracing)) as http:
        body = asked("x" * 500 + "#### 18").model_dump()
        await http.post("/score", json=body, headers=RECORDED)
        assert tracing.flush(5)

    (span,) = exporter.get_finished_spans()
    attributes = span.attributes or {}
    assert (span.name, attributes["gen_ai.evaluation.name"], attributes["gen_ai.evaluation.score.value"]) == (
        "reward",
        "gsm8k",
        1.0,
    )
    shown = json.loads(str(attributes["agentic.inputs"]))
    assert (shown["method"], shown["solution_end"]) == ("strict", "[truncated 207 bytes]" + "x" * 293 + "#### 18")
    outputs = {"score": 1.0, "correct": 1.0, "answered": 1.0}
    assert json.loads(str(attributes["agentic.outputs"])) == outputs


async def test_a_secret_that_lies_across_the_cut_is_hidden_whole(running: Run) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("reward", TracingSettings(), exporter, redact=lambda text: text.replace("5551234", "***"))
    async with running(app_of(tracing)) as http:
        body = asked(
            "y" * 50 + "5551234" + "x" * 290 + "#### 18"
        ).model_dump()  # three of its digits lie behind the cut
        await http.post("/score", json=body, headers=RECORDED)
        assert tracing.flush(5)

    (span,) = exporter.get_finished_spans()
    shown = json.loads(str((span.attributes or {})["agentic.inputs"]))
    assert shown["solution_end"] == "[truncated 50 bytes]***" + "x" * 290 + "#### 18"


async def test_without_token2text_a_span_carries_no_text(running: Run) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("reward", TracingSettings(token2text=False), exporter)
    async with running(app_of(tracing)) as http:
        await http.post("/score", json=asked("#### 18").model_dump(), headers=RECORDED)
        assert tracing.flush(5)

    (span,) = exporter.get_finished_spans()
    assert "solution_end" not in json.loads(str((span.attributes or {})["agentic.inputs"]))


async def test_every_route_has_an_example_in_the_api_document(running: Run) -> None:
    async with running(app_of()) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]

    for path, method in (("/score", "post"), ("/scorers", "get")):
        operation = paths[path][method]
        assert "example" in operation["responses"]["200"]["content"]["application/json"]
        assert method == "get" or "examples" in json.dumps(operation["requestBody"])


async def test_scores_of_a_batch_equal_single_scores_and_each_has_its_own_error(running: Run) -> None:
    requests = [
        {"data_source": "openai/gsm8k", "solution_str": text, "ground_truth": "72"} for text in ("#### 72", "#### 71")
    ]
    unknown = {"data_source": "nowhere", "solution_str": "", "ground_truth": ""}
    body = {"entries": [{"request": request} for request in [*requests, unknown]]}
    async with running(create_app(RewardSettings())) as client:
        alone = [(await client.post("/score", json=request)).json() for request in requests]
        lines = (await client.post("/score_batch", json=body)).text.splitlines()
    results = sorted((json.loads(line) for line in lines), key=lambda result: result["index"])
    assert [result.get("reply") for result in results] == [*alone, None]
    assert [reward["score"] for reward in alone] == [1.0, 0.0]
    assert results[2]["error"]["code"] == "unknown_data_source"


async def test_scores_that_are_due_together_are_one_request(running: Run) -> None:
    paths: list[str] = []

    async def note(request: httpx.Request) -> None:
        paths.append(request.url.path)

    async with running(app_of()) as http:
        http.event_hooks = {"request": [note]}
        client = RewardClient("http://reward", http, batches=True)
        texts = ["#### 18", "#### 17", "18"]
        together = await asyncio.gather(*(client.score(asked(text), session_id="group") for text in texts))
        alone = await client.score(asked("#### 18"), session_id="group")
    assert [reward.score for reward in [*together, alone]] == [1.0, 0.0, 0.0, 1.0]
    assert paths == ["/score_batch", "/score"]
