"""The trace of a session: what opened it, its calls, and the tools that its agent calls itself."""

import json
from typing import Literal

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import RequestParamsMeta

from tests.services.agent.agent_services import AgentServices
from tests.services.agent.sessions.test_session import (
    ANSWER,
    COUNT,
    QUESTION,
    SAMPLE,
    chat,
    ended,
    opened,
    two_turns,
)
from trackway.wire.sessions import SessionAccess

pytestmark = pytest.mark.anyio

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


async def opened_by(services: AgentServices, traceparent: str, trace: bool | None) -> SessionAccess:
    """A session that a caller with this trace opened."""
    services.model.scripts[0] = [ANSWER]
    body = {"sample": SAMPLE, "trace": trace}
    response = await services.client.post("/sessions", json=body, headers={"traceparent": traceparent})
    assert response.status_code == 200, response.text
    return SessionAccess.model_validate_json(response.text)


async def test_a_session_continues_the_trace_of_the_request_that_opened_it(services: AgentServices) -> None:
    access = await opened_by(services, SAMPLED, trace=None)
    await chat(services, access, QUESTION)
    trajectory = await ended(services, access)

    spans = {span.name: span for span in services.spans()}
    assert access.traceparent == f"00-{TRACE}-{trajectory.span_id}-01"
    assert {format(span.get_span_context().trace_id, "032x") for span in spans.values()} == {TRACE}
    root, turn = spans["trajectory"], spans["turn 0"]
    assert root.parent is not None and format(root.parent.span_id, "016x") == SPAN
    assert turn.parent is not None and turn.parent.span_id == root.get_span_context().span_id


async def test_a_session_with_a_trace_of_its_own_is_linked_to_the_request_that_opened_it(
    services: AgentServices,
) -> None:
    access = await opened_by(services, SAMPLED, trace=True)
    trajectory = await ended(services, access)

    [root] = [span for span in services.spans() if span.parent is None]
    assert [(format(link.context.trace_id, "032x"), format(link.context.span_id, "016x")) for link in root.links] == [
        (TRACE, SPAN)
    ]
    assert trajectory.trace_id != TRACE
    assert access.traceparent is not None
    assert access.traceparent.startswith(f"00-{trajectory.trace_id}-{trajectory.span_id}-")


@pytest.mark.parametrize(("traceparent", "trace"), [(UNSAMPLED, None), (SAMPLED, False)])
async def test_a_session_is_not_recorded_for_a_caller_that_is_not_or_when_told_so(
    services: AgentServices, traceparent: str, trace: bool | None
) -> None:
    access = await opened_by(services, traceparent, trace)
    await chat(services, access, QUESTION)
    trajectory = await ended(services, access)

    assert (access.traceparent, trajectory.trace_id, services.spans()) == (None, None, [])


async def test_each_call_is_a_turn_below_the_sessions_root(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER, trace=True)
    await two_turns(services, access)
    trajectory = await ended(services, access)

    spans = services.spans()
    [root] = [span for span in spans if span.name == "trajectory"]
    turns = [span for span in spans if span.name.startswith("turn ")]
    assert trajectory.trace_id == format(root.context.trace_id, "032x")
    assert access.traceparent is not None
    assert access.traceparent.startswith(f"00-{trajectory.trace_id}-{trajectory.span_id}-")
    assert root.context is not None
    assert [turn.parent.span_id for turn in turns] == [root.context.span_id] * 2
    written = [(turn.attributes or {})["gen_ai.usage.output_tokens"] for turn in turns]
    assert written == [len(services.model.encode(text)) for text in (COUNT, ANSWER)]
    assert sorted(span.name for span in spans if span.name.startswith("chat ")) == ["chat tiny"] * 2
    assert not any("gen_ai.conversation.compacted" in (turn.attributes or {}) for turn in turns)


async def test_a_call_that_continues_no_earlier_one_is_a_compacted_conversation(services: AgentServices) -> None:
    access = await opened(services, ANSWER, ANSWER, trace=True)
    await chat(services, access, QUESTION)
    await chat(services, access, [{"role": "user", "content": "a summary of what was said"}])
    await ended(services, access)

    turns = {span.name: span.attributes or {} for span in services.spans() if span.name.startswith("turn ")}
    assert [turns[name].get("gen_ai.conversation.compacted") for name in ("turn 0", "turn 1")] == [None, True]


async def test_a_call_shows_its_stop_sequences_and_tools_that_were_not_offered_before(services: AgentServices) -> None:
    access = await opened(services, ANSWER, ANSWER, ANSWER, trace=True)
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
    await chat(services, access, QUESTION, stop=["</s>", "END"], tools=tools)
    await chat(services, access, QUESTION, tools=tools)
    await chat(services, access, QUESTION)
    await ended(services, access)

    turns = [dict(span.attributes or {}) for span in services.spans() if span.name.startswith("turn ")]
    assert [turn.get("gen_ai.request.stop_sequences") for turn in turns] == [("</s>", "END"), None, None]
    assert [json.loads(str(turn.get("gen_ai.tool.definitions", "null"))) for turn in turns] == [tools, None, None]


async def test_a_call_with_a_span_of_the_sessions_trace_joins_it(services: AgentServices) -> None:
    access = await opened(services, ANSWER, trace=True)
    assert access.traceparent is not None
    own = f"{access.traceparent[:36]}00f067aa0ba902b7-01"
    await services.client.post(
        f"/sessions/{access.session_id}/v1/chat/completions",
        json={"model": "any", "messages": QUESTION},
        headers={"traceparent": own},
    )
    await ended(services, access)

    [turn] = [span for span in services.spans() if span.name == "turn 0"]
    assert format(turn.parent.span_id, "016x") == "00f067aa0ba902b7"


async def test_a_tool_call_with_the_sessions_traceparent_joins_its_trace(services: AgentServices) -> None:
    access = await opened(services, ANSWER, trace=True)
    assert access.traceparent is not None
    async with httpx.AsyncClient(transport=services.tools, base_url="http://tools") as tools:
        body = {"arguments": {"expression": "9+9"}}
        called = await tools.post("/tools/calculator/execute", json=body, headers={"traceparent": access.traceparent})
        assert called.status_code == 200, called.text
    trajectory = await ended(services, access)

    [tool] = [span for span in services.spans() if span.name == "execute_tool calculator"]
    assert format(tool.context.trace_id, "032x") == trajectory.trace_id


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("carrier", ["headers of the client", "header of the call", "_meta of the call"])
async def test_a_tool_call_over_mcp_with_the_sessions_traceparent_joins_its_trace(
    services: AgentServices, mode: Literal["auto", "legacy"], carrier: str
) -> None:
    access = await opened(services, trace=True)
    assert access.traceparent is not None and services.tools.app is not None
    header = {"traceparent": access.traceparent}
    meta: RequestParamsMeta | None = header if carrier == "_meta of the call" else None  # pyright: ignore[reportAssignmentType]
    async with (
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(services.tools.app),
            headers=header if carrier == "headers of the client" else {},
        ) as http,
        Client(streamable_http_client("http://tools/mcp", http_client=http), mode=mode) as client,
    ):
        if carrier == "header of the call":
            http.headers.update(header)
        await client.call_tool("calculator", {"expression": "9+9"}, meta=meta)
    trajectory = await ended(services, access)

    [tool] = [span for span in services.spans() if span.name == "execute_tool calculator"]
    assert tool.parent is not None
    assert format(tool.get_span_context().trace_id, "032x") == trajectory.trace_id
    assert format(tool.parent.span_id, "016x") == trajectory.span_id
