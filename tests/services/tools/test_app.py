"""The tool server over HTTP."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.services.tools.faulty_tool import FaultyTool
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.clients.tools import ToolsClient
from trackway.tools.app import create_app
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.settings import ToolsSettings
from trackway.tracing import Tracing, TracingSettings
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.tools import ExecuteRequest, OneShotRequest

pytestmark = pytest.mark.anyio

Run = Callable[[FastAPI], AbstractAsyncContextManager[httpx.AsyncClient]]
RECORDED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def app_of(*tools: FaultyTool | CalculatorTool, tracing: Tracing | None = None, **settings: float) -> FastAPI:
    return create_app(ToolsSettings.model_validate(settings), tools or None, tracing)


def error_of(response: httpx.Response) -> tuple[int, ErrorCode, str]:
    error = ErrorReply.model_validate_json(response.content).error
    return response.status_code, error.code, error.message


async def test_the_client_takes_a_tool_through_its_whole_life(running: Run) -> None:
    async with running(app_of()) as http:
        client = ToolsClient("http://tools", http)
        made = await client.create("calc_gsm8k_reward", "run/1/0/0", {"ground_truth": "72"})
        result = await client.execute(made.instance_id, ExecuteRequest(arguments={"answer": "72"}))
        reward = await client.reward(made.instance_id)
        await client.release(made.instance_id)
        with pytest.raises(TrackwayError) as caught:
            await client.release(made.instance_id)

    assert (result.text, result.reward, reward) == ("Current parsed answer='72' reward=1.0", 0.0, 1.0)
    assert caught.value.code is ErrorCode.INSTANCE_NOT_FOUND


async def test_both_built_in_tools_are_listed_as_openai_functions(running: Run) -> None:
    async with running(app_of()) as http:
        listed = (await http.get("/tools")).json()["tools"]

    assert [(tool["type"], tool["function"]["name"]) for tool in listed] == [
        ("function", "calculator"),
        ("function", "calc_gsm8k_reward"),
    ]


async def test_settings_choose_the_tools_and_load_further_ones_by_import_path(running: Run) -> None:
    settings = ToolsSettings(tools=["calculator"], extra_tools=["tests.services.tools.faulty_tool:FaultyTool"])
    async with running(create_app(settings)) as http:
        listed = await ToolsClient("http://tools", http).list()

    assert [tool.function.name for tool in listed] == ["calculator", "faulty"]


async def test_a_one_shot_needs_no_instance(running: Run) -> None:
    async with running(app_of()) as http:
        request = OneShotRequest(arguments={"expression": "(84 + 16) / 4"})
        result = await ToolsClient("http://tools", http).one_shot("calculator", request)

    assert (result.text, result.metrics, result.instance_reward) == ("25", {}, 0.0)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "message"),
    [
        ("/tools/abacus/execute", {"arguments": {}}, 404, ErrorCode.UNKNOWN_TOOL, "got 'abacus'"),
        ("/instances", {"tool": "abacus"}, 404, ErrorCode.UNKNOWN_TOOL, "calc_gsm8k_reward, calculator, got 'abacus'"),
        ("/instances", {"tool": "calc_gsm8k_reward"}, 422, ErrorCode.INVALID_REQUEST, "create_kwargs.ground_truth"),
        ("/instances", {"name": "calculator"}, 422, ErrorCode.INVALID_REQUEST, "body.name"),
        ("/instances/none/execute", {"arguments": {}}, 404, ErrorCode.INSTANCE_NOT_FOUND, "got 'none'"),
        (
            f"/instances/other-01234567-{'0' * 32}/execute",
            {"arguments": {}},
            410,
            ErrorCode.INSTANCE_LOST,
            "made by another replica",
        ),
        (
            "/tools/calculator/execute",
            {"arguments": {"expression": "3/0"}},
            422,
            ErrorCode.INVALID_REQUEST,
            "division by zero in '3/0'",
        ),
        (
            "/tools/calculator/execute",
            {"arguments": {"formula": "3"}},
            422,
            ErrorCode.INVALID_REQUEST,
            'missing argument: "expression"',
        ),
    ],
)
async def test_the_callers_mistakes_are_told(
    running: Run, path: str, body: dict[str, object], status: int, code: ErrorCode, message: str
) -> None:
    async with running(app_of()) as http:
        answer = error_of(await http.post(path, json=body))

    assert answer[:2] == (status, code)
    assert message in answer[2]


@ENDS_SOON
@pytest.mark.parametrize(
    ("mode", "status", "code"),
    [("raise", 500, ErrorCode.TOOL_FAILED), ("sleep", 504, ErrorCode.TOOL_TIMEOUT)],
)
async def test_a_tools_own_failure_is_a_5xx_and_the_instance_stays_usable(
    running: Run, mode: str, status: int, code: ErrorCode
) -> None:
    async with running(app_of(FaultyTool.default(), call_timeout_s=0.05)) as http:
        path = f"/instances/{(await http.post('/instances', json={'tool': 'faulty'})).json()['instance_id']}/execute"
        failed = await http.post(path, json={"arguments": {"mode": mode}})
        after = await http.post(path, json={"arguments": {"mode": "ok"}})

    assert error_of(failed)[:2] == (status, code)
    assert after.json() == {"text": "ok 1", "reward": 0.5, "metrics": {}}


async def test_an_execute_that_is_sent_again_runs_once(running: Run) -> None:
    async with running(app_of(FaultyTool.default())) as http:
        path = f"/instances/{(await http.post('/instances', json={'tool': 'faulty'})).json()['instance_id']}/execute"
        body = {"arguments": {"mode": "ok"}}
        texts = [
            (await http.post(path, json=body, headers={"idempotency-key": key})).json()["text"]
            for key in ("a", "a", "b")
        ]

    assert texts == ["ok 1", "ok 1", "ok 2"]


async def test_a_full_replica_answers_429(running: Run) -> None:
    async with running(app_of(max_instances=1)) as http:
        await http.post("/instances", json={"tool": "calculator"})
        refused = error_of(await http.post("/instances", json={"tool": "calculator"}))

    assert refused[:2] == (429, ErrorCode.OVERLOADED)


async def test_the_reaper_runs_while_the_app_does_and_the_end_releases_the_rest(running: Run) -> None:
    faulty = FaultyTool.default()
    async with running(app_of(faulty, instance_ttl_s=0.001, reap_interval_s=0.001)) as http:
        await http.post("/instances", json={"tool": "faulty"})
        await async_until(lambda: faulty.calls == {})
    async with running(app_of(faulty)) as http:
        await http.post("/instances", json={"tool": "faulty"})
        assert len(faulty.calls) == 1
    assert faulty.calls == {}


async def test_a_call_whose_client_left_ends_and_frees_the_instance(running: Run) -> None:
    faulty = FaultyTool.default()
    async with running(app_of(faulty)) as http:
        path = f"/instances/{(await http.post('/instances', json={'tool': 'faulty'})).json()['instance_id']}/execute"
        abandoned = asyncio.create_task(http.post(path, json={"arguments": {"mode": "sleep"}}))
        await async_until(lambda: faulty.running == 1)
        abandoned.cancel()
        after = await http.post(path, json={"arguments": {"mode": "ok"}})

    assert after.json()["text"] == "ok 1"


async def test_an_execute_is_a_span_with_arguments_text_and_reward(running: Run) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("tools", TracingSettings(), exporter)
    async with running(app_of(tracing=tracing)) as http:
        body = {"arguments": {"expression": "84/4"}, "tool_call_id": "call_7"}
        await http.post("/tools/calculator/execute", json=body, headers=RECORDED)
        assert tracing.flush(5)

    (span,) = exporter.get_finished_spans()
    attributes = span.attributes or {}
    assert span.name == "execute_tool calculator"
    assert span.context is not None and format(span.context.trace_id, "032x") == "a" * 32
    assert attributes["gen_ai.tool.call.id"] == "call_7"
    assert json.loads(str(attributes["agentic.inputs"])) == {"expression": "84/4"}
    assert json.loads(str(attributes["agentic.outputs"])) == {"text": "21", "reward": 0.0}


@pytest.mark.parametrize(
    ("tool", "arguments", "code"),
    [("faulty", {"mode": "raise"}, "tool_failed"), ("calculator", {"expression": "3/0"}, "invalid_request")],
)
async def test_an_error_marks_the_span_with_its_code(
    running: Run, tool: str, arguments: dict[str, str], code: str
) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("tools", TracingSettings(), exporter)
    async with running(app_of(FaultyTool.default(), CalculatorTool.default(), tracing=tracing)) as http:
        await http.post(f"/tools/{tool}/execute", json={"arguments": arguments}, headers=RECORDED)
        assert tracing.flush(5)

    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == code


async def test_a_one_shot_that_fails_before_its_execution_is_a_failed_span_too(running: Run) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("tools", TracingSettings(), exporter)
    async with running(app_of(FaultyTool.default(), tracing=tracing)) as http:
        body = {"arguments": {"mode": "ok"}, "create_kwargs": {"broken": True}}
        answer = await http.post("/tools/faulty/execute", json=body, headers=RECORDED)
        assert tracing.flush(5)

    (span,) = exporter.get_finished_spans()
    assert (answer.status_code, span.name) == (500, "execute_tool faulty")
    assert span.status.status_code is StatusCode.ERROR
    assert str(span.status.description) == "tool 'faulty' failed in create: OSError: no room"
