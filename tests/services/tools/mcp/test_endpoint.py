"""Our tools at /mcp, called by the SDK's own client over a real socket."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, RequestParamsMeta, TextContent
from opentelemetry import context, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from tests.services.tools.faulty_tool import FaultyTool
from tests.services.tools.mcp_servers import yaml_for
from tests.serving import served
from tests.waiting import async_until
from trackway.clients.tools import ToolsClient
from trackway.serving import AuthSettings
from trackway.tools.app import create_app
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.mcp.connection import ConnectionLost, McpConnection, McpServer
from trackway.tools.settings import ToolsSettings
from trackway.tracing import Tracing, TracingSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

Mode = Literal["auto", "legacy"]
TRUTH: RequestParamsMeta = {"trackway/create_kwargs": {"ground_truth": "72"}}  # pyright: ignore[reportAssignmentType]


@asynccontextmanager
async def client_of(url: str, mode: Mode = "legacy", **headers: str) -> AsyncIterator[Client]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        httpx2.AsyncClient(headers=sent) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def shown(result: CallToolResult) -> tuple[str, bool]:
    (part,) = result.content
    assert isinstance(part, TextContent)
    return part.text, bool(result.is_error)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_every_tool_is_listed_with_its_parameters(mode: Mode) -> None:
    async with served(create_app(ToolsSettings())) as url, client_of(url, mode) as client:
        listed = (await client.list_tools()).tools

    schema = CalculatorTool.default().tool_schema.function
    assert [tool.name for tool in listed] == ["calculator", "calc_gsm8k_reward"]
    assert (listed[0].description, listed[0].input_schema) == (schema.description, schema.parameters)


async def test_state_lives_as_long_as_the_session_and_is_released_with_it() -> None:
    faulty, other_tool = FaultyTool.default(), Gsm8kTool.default()
    async with served(create_app(ToolsSettings(), [faulty, other_tool])) as url:
        async with client_of(url) as first, client_of(url) as second:
            texts = [shown(await client.call_tool("faulty", {"mode": "ok"}))[0] for client in (first, first, second)]
            assert len(faulty.calls) == 2
        await async_until(lambda: not faulty.calls)

    assert texts == ["ok 1", "ok 2", "ok 1"]


async def given_up(client: Client, mode: str) -> None:
    with pytest.raises(MCPError, match=r"[Tt]imed out"):
        await client.call_tool("faulty", {"mode": mode}, read_timeout_seconds=0.2)


async def test_a_call_that_its_client_gives_up_runs_to_its_end_and_the_state_stays() -> None:
    faulty = FaultyTool.default()
    async with served(create_app(ToolsSettings(), [faulty])) as url, client_of(url) as client:
        first = shown(await client.call_tool("faulty", {"mode": "ok"}))
        faulty.gate.clear()
        await given_up(client, "ok")
        await client.list_tools()  # the server has heard of it
        running = (faulty.running, len(faulty.calls))
        faulty.gate.set()
        third = shown(await client.call_tool("faulty", {"mode": "ok"}))

    assert (first, running, third) == (("ok 1", False), (1, 1), ("ok 3", False))


async def test_a_call_that_its_client_gives_up_before_it_begins_never_runs() -> None:
    faulty = FaultyTool.default()
    async with served(create_app(ToolsSettings(), [faulty])) as url, client_of(url) as client:
        faulty.gate.clear()
        await given_up(client, "ok")
        await given_up(client, "ok")
        await client.list_tools()  # the server has heard of the second one too
        started = faulty.started
        faulty.gate.set()
        after = shown(await client.call_tool("faulty", {"mode": "ok"}))

    assert (started, after, faulty.started) == (1, ("ok 2", False), 2)


async def test_a_session_that_ends_cuts_off_the_call_that_its_client_gave_up() -> None:
    faulty = FaultyTool.default()
    async with served(create_app(ToolsSettings(), [faulty])) as url:
        async with client_of(url) as client:
            await given_up(client, "sleep")
        await async_until(lambda: (faulty.running, faulty.calls) == (0, {}))


async def test_state_that_is_lost_with_a_call_that_does_not_stop_is_told_once() -> None:
    faulty = FaultyTool.default()
    settings = ToolsSettings(call_timeout_s=0.05, stop_timeout_s=0.05)
    async with served(create_app(settings, [faulty])) as url, client_of(url) as client:
        texts = [shown(await client.call_tool("faulty", {"mode": mode})) for mode in ("ok", "block", "ok", "ok")]
        faulty.unblock.set()

    late = "tool 'faulty': expected execute to end within 0.05 s; ask for less at once, or raise call_timeout_s"
    lost = (
        "the state of faulty in this session is lost: its last call did not stop when it was cancelled; "
        "the next call makes a new one"
    )
    assert texts == [("ok 1", False), (late, True), (lost, True), ("ok 1", False)]


async def test_create_kwargs_come_by_meta_and_rewards_go_back_by_it() -> None:
    async with served(create_app(ToolsSettings())) as url, client_of(url) as client:
        meta: RequestParamsMeta = {**TRUTH, "trackway/want_reward": True}  # pyright: ignore[reportAssignmentType]
        right = await client.call_tool("calc_gsm8k_reward", {"answer": "72"}, meta=meta)
        again = await client.call_tool("calc_gsm8k_reward", {"answer": "72"})

    assert shown(right) == ("Current parsed answer='72' reward=1.0", False)
    assert right.meta is not None
    assert right.meta["trackway/instance_reward"] == 1.0
    assert again.meta is not None
    assert (again.meta["trackway/reward"], again.meta["trackway/instance_id"]) == (
        -0.05,
        right.meta["trackway/instance_id"],
    )


async def test_the_protocol_without_sessions_keeps_state_by_x_session_id() -> None:
    faulty = FaultyTool.default()
    async with served(create_app(ToolsSettings(), [faulty])) as url:
        async with client_of(url, "auto", x_session_id="run/1") as stateful, client_of(url, "auto") as stateless:
            texts = [
                shown(await client.call_tool("faulty", {"mode": "ok"}))[0]
                for client in (stateful, stateful, stateless, stateless)
            ]
        async with httpx2.AsyncClient() as http:
            ended = await http.delete(f"{url}/mcp", headers={"x-session-id": "run/1"})

    assert texts == ["ok 1", "ok 2", "ok 1", "ok 1"]
    assert (ended.status_code, faulty.calls) == (204, {})


async def test_what_the_call_did_wrong_is_told_in_the_result_and_an_unknown_tool_is_an_error() -> None:
    async with served(create_app(ToolsSettings(tools=["calculator"]))) as url, client_of(url) as client:
        wrong = await client.call_tool("calculator", {"expr": "1"})
        with pytest.raises(MCPError, match="expected one of the tools calculator, got 'abacus'"):
            await client.call_tool("abacus", {})
        with pytest.raises(MCPError, match="_meta: trackway/create_kwargs"):
            bad: RequestParamsMeta = {"trackway/create_kwargs": 1}  # pyright: ignore[reportAssignmentType]
            await client.call_tool("calculator", {"expression": "1"}, meta=bad)

    text, is_error = shown(wrong)
    assert is_error
    assert "unknown argument: 'expr'" in text
    assert wrong.meta == {"trackway/error": "invalid_request"}


async def test_an_expired_instance_is_told_once_and_then_made_anew() -> None:
    faulty, gsm8k = FaultyTool.default(), Gsm8kTool.default()
    settings = ToolsSettings(instance_ttl_s=0.5, reap_interval_s=0.05)
    async with (
        served(create_app(settings, [faulty, gsm8k])) as url,
        client_of(url, "auto", x_session_id="a") as client,
    ):
        await client.call_tool("faulty", {"mode": "ok"})
        while faulty.calls:  # the other tool's calls keep the session known
            await client.call_tool("calc_gsm8k_reward", {"answer": "1"}, meta=TRUTH)
        told = shown(await client.call_tool("faulty", {"mode": "ok"}))
        anew = shown(await client.call_tool("faulty", {"mode": "ok"}))

    assert (told[1], "the state of faulty in this session" in told[0]) == (True, True)
    assert anew == ("ok 1", False)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_callers_trace_goes_on_in_the_tools_span(mode: Mode) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("tools", TracingSettings(), exporter=exporter)
    caller = SpanContext(0xABC << 64 | 1, 5, is_remote=True, trace_flags=TraceFlags(1))
    async with served(create_app(ToolsSettings(), tracing=tracing)) as url, client_of(url, mode) as client:
        token = context.attach(trace.set_span_in_context(NonRecordingSpan(caller)))
        await client.call_tool("calculator", {"expression": "1 + 1"})
        context.detach(token)
        tracing.flush(5.0)
        spans = [(span.name, span.context.trace_id, span.parent.span_id) for span in exporter.get_finished_spans()]

    assert spans == [("execute_tool calculator", caller.trace_id, 5)]


async def test_without_a_token_there_is_no_mcp() -> None:
    auth = AuthSettings.model_validate({"tokens": {"agents": {"secret": "0123456789abcdef"}}})
    async with served(create_app(ToolsSettings(auth=auth))) as url:
        async with httpx2.AsyncClient() as http:
            assert (await http.post(f"{url}/mcp", json={})).status_code == 401
        async with client_of(url, authorization="Bearer 0123456789abcdef") as client:
            assert shown(await client.call_tool("calculator", {"expression": "1 + 1"})) == ("2", False)


async def test_the_tools_of_one_tool_server_appear_in_another(tmp_path: Path) -> None:
    faulty = FaultyTool.default()
    async with served(create_app(ToolsSettings(), [Gsm8kTool.default(), faulty])) as url:
        path = yaml_for(tmp_path, {"other": {"url": f"{url}/mcp"}})
        async with served(create_app(ToolsSettings(tool_config_path=path))) as here:
            client = ToolsClient(here)
            made = await client.create("calc_gsm8k_reward", "run/1/0/0", {"ground_truth": "72"})
            request = ExecuteRequest(arguments={"answer": "72"})
            results = [await client.execute(made.instance_id, request) for _ in range(2)]
            reward = await client.reward(made.instance_id)
            second = await client.create("faulty", "run/1/0/0")
            await client.execute(second.instance_id, ExecuteRequest(arguments={"mode": "ok"}))
            with pytest.raises(TrackwayError, match="tool 'faulty' failed in execute: ZeroDivisionError") as caught:
                await client.execute(second.instance_id, ExecuteRequest(arguments={"mode": "raise"}))
            assert len(faulty.calls) == 1
            for instance in (made, second):
                await client.release(instance.instance_id)
            await async_until(lambda: not faulty.calls)

    assert [result.reward for result in results] == [0.0, -0.05]
    assert (reward, caught.value.code) == (1.0, ErrorCode.TOOL_FAILED)


async def test_there_is_no_stream_to_listen_on() -> None:
    async with served(create_app(ToolsSettings())) as url, httpx2.AsyncClient() as http:
        answer = await http.get(f"{url}/mcp", headers={"accept": "text/event-stream"})

    assert answer.status_code == 405


async def test_a_server_that_is_told_to_stop_does_not_wait_for_open_sessions() -> None:
    async with served(create_app(ToolsSettings(tools=["calculator"]))) as url:
        connection = McpConnection(McpServer(url=f"{url}/mcp"), "ours", None, "legacy")
        await connection.open(timeout_s=5.0)
        await connection.call("calculator", {"expression": "1"}, {})
        told = time.monotonic()
    assert time.monotonic() - told < 3.0
    with pytest.raises(ConnectionLost):
        await connection.call("calculator", {"expression": "1"}, {})
    await connection.close()
