"""The formats of a session's model beside chat completions: OpenAI's Responses and Anthropic's Messages."""

import json
from typing import Any

import pytest

from tests.services.agent.agent_services import AgentServices, call
from tests.services.agent.scripted_model import END
from tests.services.agent.sessions.test_session import (
    ANSWER,
    ARGUMENTS,
    COUNT,
    PLAN,
    SAMPLE,
    TOOLS,
    ended,
    opened,
    retry,
    state,
)
from trackway.learner.filtering import TrainStatus, train_status
from trackway.wire.sessions import NodeKind, SessionAccess

pytestmark = pytest.mark.anyio

FUNCTION = {"type": "function", "name": "calculator", "parameters": {}}
TOOL = {"name": "calculator", "input_schema": {}}


async def post(
    services: AgentServices, access: SessionAccess, route: str, retries: int = 0, **body: Any
) -> dict[str, Any]:
    """The answer; that of a stream is put together again."""
    path = f"/sessions/{access.session_id}/v1/{route}"
    response = await services.client.post(path, json={"model": "any", **body}, headers=retry(retries))
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
@pytest.mark.parametrize("by", ["items", "references", "previous_response_id"])
@pytest.mark.parametrize("retries", [0, 1])
async def test_responses_continue_by_items_references_or_the_previous_response(
    services: AgentServices, by: str, stream: bool, retries: int
) -> None:
    """By references as Vercel's AI SDK does."""
    access = await opened(services, COUNT, ANSWER)
    firsts = [
        await post(services, access, "responses", count, input="9+9?", tools=[FUNCTION], stream=stream)
        for count in range(retries + 1)
    ]
    first = firsts[-1]
    [function_call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": function_call["call_id"], "output": "18"}
    question = {"role": "user", "content": "9+9?"}
    more: dict[str, Any] = {"input": [question, *first["output"], result]}
    if by == "references":
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        more = {"input": [question, *references, result]}
    elif by == "previous_response_id":
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
async def test_a_retry_is_answered_from_the_record_streamed_or_not(
    services: AgentServices, route: str, first_streamed: bool
) -> None:
    access, body = await opened(services, COUNT, ANSWER), REPEATED[route]

    answers = [
        await post(services, access, route, retries, **body, stream=stream)
        for retries, stream in enumerate((first_streamed, not first_streamed, first_streamed))
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


async def refused(services: AgentServices, access: SessionAccess, route: str, **body: Any) -> dict[str, Any]:
    response = await services.client.post(f"/sessions/{access.session_id}/v1/{route}", json={"model": "any", **body})
    assert response.status_code == 400
    return response.json()["error"]


async def test_a_format_of_the_text_guides_responses_and_messages(services: AgentServices) -> None:
    access = await opened(services, ANSWER, ANSWER)
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    wanted: dict[str, Any] = {"type": "json_schema", "schema": schema}
    text = {"format": {**wanted, "name": "answer"}}
    question = {"role": "user", "content": "9+9?"}
    response = await post(services, access, "responses", input="9+9?", text=text)
    await post(services, access, "messages", messages=[question], max_tokens=9, output_config={"format": wanted})

    grammars = [request.sampling_params.structured_outputs for request in services.model.seen()]
    assert [grammar and grammar.json_schema for grammar in grammars] == [schema, schema]
    assert response["text"] == text


async def test_a_format_beside_tools_guides_calls_and_answers_in_every_format(services: AgentServices) -> None:
    count, answer = call("calculator", ARGUMENTS) + END, '{"count": 18}' + END
    access = await opened(services, count, answer, *(answer,) * 3)
    wanted: dict[str, Any] = {"type": "json_schema", "schema": PLAN}
    text = {"format": {**wanted, "name": "plan"}}
    items: list[dict[str, Any]] = [{"role": "user", "content": "9+9?"}]
    calls = await post(services, access, "responses", input=items, text=text, tools=[FUNCTION])
    [asked] = calls["output"]
    items += [asked, {"type": "function_call_output", "call_id": asked["call_id"], "output": "18"}]
    answers = await post(services, access, "responses", input=items, text=text, tools=[FUNCTION])
    question = [{"role": "user", "content": "9+9?"}]
    config = {"format": wanted}
    await post(services, access, "messages", messages=question, max_tokens=99, output_config=config, tools=[TOOL])
    chat = {"messages": question, "tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": wanted}}
    chat["response_format"]["json_schema"] = {"name": "plan", "schema": PLAN}
    await post(services, access, "chat/completions", **chat)
    await post(services, access, "chat/completions", **chat, tool_choice="none")
    trajectory = await ended(services, access)

    assert (asked["name"], asked["arguments"]) == ("calculator", ARGUMENTS)
    assert answers["output"][0]["content"][0]["text"] == '{"count": 18}'
    grammars = [request.sampling_params.structured_outputs for request in services.model.seen()]
    tags = [grammar.structural_tag for grammar in grammars if grammar is not None]
    assert tags[0] is not None and tags == [tags[0]] * 4 + [None]
    elements = json.loads(tags[0])["format"]["elements"]
    assert elements[1] == {"type": "json_schema", "json_schema": PLAN}
    assert [tag["begin"] for tag in elements[0]["tags"]] == ['<tool_call>\n{"name": "calculator", "arguments": ']
    assert all(turn.guided for row in trajectory.rows for turn in row.turns)
    assert not any(sum(row.response_mask) for row in trajectory.rows)
    assert train_status(trajectory, 3, None) is TrainStatus.GUIDED


FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "chat/completions": (
        {
            "messages": [{"role": "user", "content": "9+9?"}],
            "tools": TOOLS,
            "response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}},
        },
        "response_format",
    ),
    "responses": (
        {
            **REPEATED["responses"],
            "text": {"format": {"type": "json_schema", "name": "plan", "schema": PLAN}},
        },
        "text.format",
    ),
    "messages": (
        {**REPEATED["messages"], "output_config": {"format": {"type": "json_schema", "schema": PLAN}}},
        "output_config.format",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", FORMATS)
async def test_a_format_that_is_only_noted_guides_nothing_and_its_answer_is_trained(
    services: AgentServices, route: str, stream: bool
) -> None:
    services.model.capabilities = frozenset()  # an engine that could not guide
    answer = '{"count": 18}' + END
    access = await opened(services, answer, formats="note")
    path, (body, field) = f"/sessions/{access.session_id}/v1/{route}", FORMATS[route]
    asked = {"model": "any", **body}
    replies = [
        await services.client.post(path, json={**asked, "stream": flag}, headers=retry(retries))
        for retries, flag in enumerate((stream, False))
    ]
    seen = await state(services, access)
    trajectory = await ended(services, access)

    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[1].json().get("text", {"format": {"type": "text"}}) == {"format": {"type": "text"}}
    assert seen.ignored_fields == [field]
    [request] = services.model.seen()
    assert request.sampling_params.structured_outputs is None
    written = services.model.encode(answer)
    assert (trajectory.response_ids, trajectory.response_mask) == (written, [1] * len(written))
    assert [(turn.guided, turn.finish_reason) for turn in trajectory.turns] == [(False, "stop")]
    assert [(span.start, span.end) for span in trajectory.weight_versions] == [(0, len(written))]
    assert train_status(trajectory, 3, None) is TrainStatus.USED


def costly(levels: int = 20) -> dict[str, Any]:
    """A schema beyond each bound of those that may guide: its bytes, its depth, and its values of an enum."""
    schema: dict[str, Any] = {"enum": [f"{number:064}" for number in range(1001)]}
    for _ in range(levels):
        schema = {"properties": {"x": schema}}
    return schema


@pytest.mark.parametrize("route", FORMATS)
async def test_a_schema_too_large_to_guide_is_refused_by_its_bound_unless_formats_are_only_noted(
    services: AgentServices, route: str
) -> None:
    guides, notes = await opened(services, ANSWER), await opened(services, ANSWER, formats="note")
    body, field = FORMATS[route]
    large = json.loads(json.dumps(body).replace(json.dumps(PLAN), json.dumps(costly())))

    error = await refused(services, guides, route, **large)
    await post(services, notes, route, **large)
    seen, trajectory = await state(services, notes), await ended(services, notes)

    assert "response_format: expected a JSON schema with at most 65536 bytes of JSON, got 6" in error["message"]
    assert seen.ignored_fields == [field]
    assert [request.sampling_params.structured_outputs for request in services.model.seen()] == [None]
    assert train_status(trajectory, 3, None) is TrainStatus.USED


async def test_what_becomes_of_formats_is_one_of_two(services: AgentServices) -> None:
    response = await services.client.post("/sessions", json={"sample": SAMPLE, "formats": "drop"})

    assert response.status_code == 422
    assert "Input should be 'guide' or 'note'" in response.json()["error"]["message"]


async def test_a_forced_call_has_no_format_and_is_trained(services: AgentServices) -> None:
    said = call("calculator", ARGUMENTS).removeprefix("<tool_call>") + END
    access = await opened(services, said)
    await post(
        services,
        access,
        "chat/completions",
        messages=[{"role": "user", "content": "9+9?"}],
        tools=TOOLS,
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    trajectory = await ended(services, access)

    assert services.model.seen()[0].sampling_params.structured_outputs is None
    assert trajectory.response_mask == [1] * len(services.model.encode(said))


async def test_strict_tools_are_not_guided_and_noted_and_their_prompt_is_the_same(services: AgentServices) -> None:
    question = [{"role": "user", "content": "9+9?"}]
    function = {"name": "calculator", "parameters": {}}
    for strict in (True, False):
        access = await opened(services, *(ANSWER,) * 3)
        services.model.begin_again()
        await post(
            services,
            access,
            "chat/completions",
            messages=question,
            tools=[{"type": "function", "function": {**function, "strict": strict}}],
        )
        await post(services, access, "responses", input=question, tools=[{**FUNCTION, "strict": strict}])
        await post(services, access, "messages", messages=question, max_tokens=9, tools=[{**TOOL, "strict": strict}])
        assert (await state(services, access)).ignored_fields == (["tools.strict"] if strict else [])
    seen = services.model.seen()

    assert all(request.sampling_params.structured_outputs is None for request in seen)
    assert len({tuple(request.token_ids) for request in seen}) == 1


async def test_a_format_that_cannot_be_had_is_refused_by_name_in_responses_and_messages(
    services: AgentServices,
) -> None:
    services.model.capabilities = frozenset()
    access = await opened(services)
    text = {"format": {"type": "json_object"}}
    of_response = await refused(services, access, "responses", input="9+9?", text=text)
    question = {"role": "user", "content": "9+9?"}
    of_message = await refused(
        services, access, "messages", messages=[question], max_tokens=9, output_format={"type": "json_schema"}
    )

    assert "response_format: expected an engine that guides its sampling" in of_response["message"]
    assert "output_format: expected nothing" in of_message["message"]
    assert "give it as output_config.format" in of_message["message"]


async def test_fields_without_effect_are_noted_in_every_format(services: AgentServices) -> None:
    access = await opened(services, ANSWER, ANSWER, ANSWER)
    question = {"role": "user", "content": "9+9?"}
    reply = await post(services, access, "responses", input="9+9?", temperature=0.1, truncation="auto", one=1)
    await post(services, access, "messages", messages=[question], max_tokens=9, top_k=7, metadata={}, two=2)
    await post(services, access, "completions", prompt="9+9=", best_of=3, three=3)
    await post(services, access, "messages/count_tokens", messages=[question], four=4)

    names = ["best_of", "four", "metadata", "one", "temperature", "three", "top_k", "truncation", "two"]
    assert (await state(services, access)).ignored_fields == names
    assert reply["temperature"] == 1.0


async def test_a_reference_to_an_unknown_item_is_refused(services: AgentServices) -> None:
    access = await opened(services)
    items = [{"role": "user", "content": "9+9?"}, {"type": "item_reference", "id": "msg_1"}]

    error = await refused(services, access, "responses", input=items)

    assert error["param"] == "input"
    said = "input[1]: expected an item of a response of this session, got 'msg_1'; send the item itself"
    assert error["message"] == said


@pytest.mark.parametrize(
    ("method", "route", "kind"),
    [
        ("POST", "embeddings", "invalid_request_error"),
        ("GET", "chat/completions/7", "invalid_request_error"),
        ("POST", "messages/batches", "not_found_error"),
    ],
)
async def test_an_unknown_route_is_refused_in_its_apis_format_with_the_routes(
    services: AgentServices, method: str, route: str, kind: str
) -> None:
    access = await opened(services)

    for path, headers in ((f"/sessions/{access.session_id}", {}), ("", {"x-api-key": access.api_key})):
        response = await services.client.request(method, f"{path}/v1/{route}", headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (404, kind)
        assert ("type" in response.json()) == (kind == "not_found_error")
        message = response.json()["error"]["message"]
        assert "POST /v1/responses" in message and f"got {method} /v1/{route};" in message


@pytest.mark.parametrize(
    ("method", "route", "allowed"),
    [
        ("GET", "chat/completions", "POST"),
        ("PUT", "messages", "POST"),
        ("DELETE", "messages/count_tokens", "POST"),
        ("POST", "models", "GET"),
        ("DELETE", "models/policy", "GET"),
        ("PATCH", "responses", "POST"),
        ("OPTIONS", "completions", "POST"),
    ],
)
async def test_a_wrong_method_is_refused_in_its_apis_format_with_the_right_one(
    services: AgentServices, method: str, route: str, allowed: str
) -> None:
    access = await opened(services)

    for path, headers in ((f"/sessions/{access.session_id}", {}), ("", {"x-api-key": access.api_key})):
        response = await services.client.request(method, f"{path}/v1/{route}", headers=headers)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert f"{allowed} /v1/{route}" in error["message"] and f"got {method} /v1/{route};" in error["message"]


@pytest.mark.parametrize(
    ("path", "kind", "is_anthropic"),
    [
        ("/v1/chat/completions", "invalid_request_error", False),
        ("/v1/responses", "invalid_request_error", False),
        ("/v1/embeddings", "invalid_request_error", False),
        ("/v1/messages", "request_too_large", True),
        ("/v1/messages/count_tokens", "request_too_large", True),
    ],
)
async def test_a_body_that_is_too_large_is_refused_in_its_apis_format(
    services: AgentServices, path: str, kind: str, is_anthropic: bool
) -> None:
    access = await opened(services)
    most = services.agent.state.settings.max_body_bytes

    for base, headers in ((f"/sessions/{access.session_id}", {}), ("", {"x-api-key": access.api_key})):
        headers = {**headers, "content-type": "application/json", "content-length": f"{most + 1}"}
        response = await services.client.post(f"{base}{path}", content=b"{}", headers=headers)
        assert (response.status_code, response.headers["x-should-retry"]) == (413, "false")
        error = response.json()["error"]
        assert (error["type"], "param" in error, response.json().get("type") == "error") == (
            kind,
            not is_anthropic,
            is_anthropic,
        )
        assert error["message"].startswith(f"expected a body of at most {most} bytes, got {most + 1} or more")


async def test_a_body_that_is_too_large_for_a_route_of_the_service_is_refused_in_its_own_format(
    services: AgentServices,
) -> None:
    headers = {"content-type": "application/json", "content-length": "9" * 12}
    response = await services.client.post("/sessions", content=b"{}", headers=headers)

    assert response.status_code == 413 and "x-should-retry" not in response.headers
    assert set(response.json()["error"]) == {"code", "message", "retryable", "detail"}


async def test_a_wrong_method_beside_the_model_is_refused_with_the_right_one(services: AgentServices) -> None:
    access = await opened(services)

    for method, route, allowed in (
        ("GET", "/reward", "POST"),
        ("POST", "/trajectory", "GET"),
        ("POST", "", "DELETE"),
        ("HEAD", "/v1/responses", "POST"),
    ):
        response = await services.client.request(method, f"/sessions/{access.session_id}{route}")
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("route", "remedy"),
    [
        ("/chat/completions", "end the base URL of OpenAI's clients in /v1"),
        ("/completions", "end the base URL of OpenAI's clients in /v1"),
        ("/responses", "end the base URL of OpenAI's clients in /v1"),
        ("/v1/v1/messages", "leave /v1 out of the base URL of Anthropic's clients"),
    ],
)
async def test_a_base_url_of_the_other_api_is_refused_in_the_clients_format_with_the_remedy(
    services: AgentServices, route: str, remedy: str
) -> None:
    access = await opened(services)

    for path, headers in ((f"/sessions/{access.session_id}", {}), ("", {"x-api-key": access.api_key})):
        response = await services.client.post(f"{path}{route}", json={}, headers=headers)
        assert (response.status_code, "type" in response.json()) == (404, route.endswith("messages"))
        message = response.json()["error"]["message"]
        assert f"got POST {path if '/v1/' not in route else ''}{route}; {remedy}" in message
