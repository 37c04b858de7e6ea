"""The formats of a session's model beside chat completions: OpenAI's Responses and Anthropic's Messages."""

import json
from typing import Any

import pytest

from tests.services.agent.agent_services import AgentServices
from tests.services.agent.sessions.test_session import ANSWER, ARGUMENTS, COUNT, ended, opened, state
from trackway.wire.sessions.graph import NodeKind
from trackway.wire.sessions.session import SessionAccess

pytestmark = pytest.mark.anyio

FUNCTION = {"type": "function", "name": "calculator", "parameters": {}}
TOOL = {"name": "calculator", "input_schema": {}}


async def post(services: AgentServices, access: SessionAccess, route: str, **body: Any) -> dict[str, Any]:
    """The answer; that of a stream is put together again."""
    path = f"/sessions/{access.session_id}/v1/{route}"
    response = await services.client.post(path, json={"model": "any", **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return whole_response(events) if route == "responses" else whole_message(events)


def whole_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of the last event, whose items are those that were sent before."""
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == items
    return events[-1]["response"]


def whole_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of Anthropic's stream make up."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input_json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["input_json"] += delta.get("partial_json", "")
    for block in blocks:
        written = block.pop("input_json")
        if block["type"] == "tool_use":
            del block["text"]
            block["input"] = json.loads(written)
    assert events[-1]["type"] == "message_stop"
    return {**events[0]["message"], "content": blocks}


async def is_one_row(services: AgentServices, access: SessionAccess) -> None:
    trajectory = await ended(services, access)
    encode = services.model.encode
    observation = encode("\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_ids == encode(COUNT) + observation + encode(ANSWER)
    assert sum(trajectory.response_mask) == len(encode(COUNT)) + len(encode(ANSWER))
    assert trajectory.further_rows == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whole_input", [True, False])
async def test_responses_continue_by_their_input_or_by_the_previous_response(
    services: AgentServices, whole_input: bool, stream: bool
) -> None:
    access = await opened(services, COUNT, ANSWER)
    first = await post(services, access, "responses", input="9+9?", tools=[FUNCTION], stream=stream)
    [function_call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": function_call["call_id"], "output": "18"}
    question = {"role": "user", "content": "9+9?"}
    more: dict[str, Any] = {"input": [question, *first["output"], result]}
    if not whole_input:
        more = {"input": [result], "previous_response_id": first["id"]}

    second = await post(services, access, "responses", tools=[FUNCTION], stream=stream, **more)

    assert json.loads(function_call["arguments"]) == json.loads(ARGUMENTS)
    assert second["output"][0]["content"][0]["text"] == "#### 18"
    await is_one_row(services, access)


async def test_a_response_of_another_session_is_refused(services: AgentServices) -> None:
    access = await opened(services)
    response = await services.client.post(
        f"/sessions/{access.session_id}/v1/responses",
        json={"model": "any", "input": "9+9?", "previous_response_id": "resp_0"},
    )

    assert response.status_code == 400
    assert "expected a response of this session, got 'resp_0'" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_anthropic_continue_the_same_row(services: AgentServices, stream: bool) -> None:
    access = await opened(services, COUNT, ANSWER)
    question = {"role": "user", "content": "9+9?"}
    asked: dict[str, Any] = {"tools": [TOOL], "max_tokens": 512, "stream": stream}
    first = await post(services, access, "messages", messages=[question], **asked)
    [tool_use] = [block for block in first["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": tool_use["id"], "content": "18"}
    messages = [question, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]

    second = await post(services, access, "messages", messages=messages, **asked)

    assert tool_use["input"] == json.loads(ARGUMENTS)
    assert second["content"] == [{"type": "text", "text": "#### 18"}]
    await is_one_row(services, access)


REPEATED: dict[str, dict[str, Any]] = {
    "responses": {"input": "9+9?", "tools": [FUNCTION]},
    "messages": {"messages": [{"role": "user", "content": "9+9?"}], "tools": [TOOL], "max_tokens": 512},
}


@pytest.mark.parametrize("first_streamed", [False, True])
@pytest.mark.parametrize("route", REPEATED)
async def test_the_same_body_again_is_answered_from_the_record_streamed_or_not(
    services: AgentServices, route: str, first_streamed: bool
) -> None:
    access, body = await opened(services, COUNT, ANSWER), REPEATED[route]

    answers = [
        await post(services, access, route, **body, stream=stream)
        for stream in (first_streamed, not first_streamed, first_streamed)
    ]

    assert [said(answer) for answer in answers] == [["I will count.", json.loads(ARGUMENTS)]] * 3
    assert len(services.model.requests) == 1
    kinds = [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.RETRY, NodeKind.RETRY]
    assert [node.kind for node in (await state(services, access)).nodes] == kinds
    trajectory = await ended(services, access)
    assert (trajectory.response_ids, trajectory.further_rows) == (services.model.encode(COUNT), [])


def said(answer: dict[str, Any]) -> list[object]:
    """Text and arguments of an answer's items or blocks."""
    parts: list[object] = []
    for item in answer["content"] if "content" in answer else answer["output"]:
        if item["type"] in ("function_call", "tool_use"):
            parts.append(item["input"] if item["type"] == "tool_use" else json.loads(item["arguments"]))
        else:
            parts.append(item["text"] if item["type"] == "text" else item["content"][0]["text"])
    return parts


async def test_a_token_count_is_an_auxiliary_call(services: AgentServices) -> None:
    access = await opened(services)
    question = {"role": "user", "content": "9+9?"}

    reply = await post(services, access, "messages/count_tokens", messages=[question])

    prompt = "<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
    assert reply == {"input_tokens": len(services.model.encode(prompt))}
    assert [node.kind for node in (await state(services, access)).nodes] == [NodeKind.AUXILIARY]
