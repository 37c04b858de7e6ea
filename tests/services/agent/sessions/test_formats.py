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
    path = f"/sessions/{access.session_id}/v1/{route}"
    response = await services.client.post(path, json={"model": "any", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def is_one_row(services: AgentServices, access: SessionAccess) -> None:
    trajectory = await ended(services, access)
    encode = services.model.encode
    observation = encode("\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_ids == encode(COUNT) + observation + encode(ANSWER)
    assert sum(trajectory.response_mask) == len(encode(COUNT)) + len(encode(ANSWER))
    assert trajectory.further_rows == []


@pytest.mark.parametrize("whole_input", [True, False])
async def test_responses_continue_by_their_input_or_by_the_previous_response(
    services: AgentServices, whole_input: bool
) -> None:
    access = await opened(services, COUNT, ANSWER)
    first = await post(services, access, "responses", input="9+9?", tools=[FUNCTION])
    [function_call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": function_call["call_id"], "output": "18"}
    question = {"role": "user", "content": "9+9?"}
    more: dict[str, Any] = {"input": [question, *first["output"], result]}
    if not whole_input:
        more = {"input": [result], "previous_response_id": first["id"]}

    second = await post(services, access, "responses", tools=[FUNCTION], **more)

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


async def test_messages_of_anthropic_continue_the_same_row(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER)
    question = {"role": "user", "content": "9+9?"}
    first = await post(services, access, "messages", messages=[question], tools=[TOOL], max_tokens=512)
    [tool_use] = [block for block in first["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": tool_use["id"], "content": "18"}
    messages = [question, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]

    second = await post(services, access, "messages", messages=messages, tools=[TOOL], max_tokens=512)

    assert tool_use["input"] == json.loads(ARGUMENTS)
    assert second["content"] == [{"type": "text", "text": "#### 18"}]
    await is_one_row(services, access)


async def test_a_token_count_is_an_auxiliary_call(services: AgentServices) -> None:
    access = await opened(services)
    question = {"role": "user", "content": "9+9?"}

    reply = await post(services, access, "messages/count_tokens", messages=[question])

    prompt = "<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
    assert reply == {"input_tokens": len(services.model.encode(prompt))}
    assert [node.kind for node in (await state(services, access)).nodes] == [NodeKind.AUXILIARY]
