"""Items of the Responses API as chat messages."""

import pytest
from pydantic import JsonValue

from trackway.model_api.openai.responses import chat_of_response
from trackway.wire.openai import ChatMessage
from trackway.wire.responses import ResponsesRequest

CALL: JsonValue = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{ "a":1}', "id": "fc_1"}
OTHER: JsonValue = {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"}
RESULT: JsonValue = {"type": "function_call_output", "call_id": "c1", "output": "2"}
USER: JsonValue = {
    "role": "user",
    "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
}


def said(text: str) -> JsonValue:
    """A message of an earlier response."""
    content: list[JsonValue] = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content}


def shown(*items: JsonValue, earlier: list[ChatMessage] | None = None, **fields: JsonValue) -> list[tuple[str, object]]:
    """Role and content of each message; an assistant's content with the ids of its calls."""
    request = ResponsesRequest.model_validate({"model": "m", "input": list(items), **fields})
    return [
        (message.role, (message.content, [call.id for call in message.tool_calls]))
        if message.role == "assistant"
        else (message.role, message.content)
        for message in chat_of_response(request, earlier or []).messages
    ]


@pytest.mark.parametrize(
    ("items", "turn"),
    [
        ([said("x"), CALL, OTHER], ("x", ["c1", "c2"])),
        ([CALL, said("x"), OTHER], ("x", ["c1", "c2"])),
        ([said("x"), CALL, said("y")], ("xy", ["c1"])),
        ([CALL], ("", ["c1"])),
    ],
)
def test_the_items_of_one_response_are_one_message_in_whatever_order_they_come_back(
    items: list[JsonValue], turn: tuple[str, list[str]]
) -> None:
    assert shown(USER, *items, RESULT) == [("user", "a\nb"), ("assistant", turn), ("tool", "2")]


def test_two_messages_in_a_row_are_two_turns() -> None:
    assert shown(USER, said("x"), said("y")) == [("user", "a\nb"), ("assistant", ("x", [])), ("assistant", ("y", []))]


def test_a_call_keeps_its_id_and_the_text_of_its_arguments() -> None:
    request = ResponsesRequest.model_validate({"model": "m", "input": [USER, CALL, RESULT]})
    _, asked, answered = chat_of_response(request).messages
    [call] = asked.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("c1", "add", '{ "a":1}')
    assert (answered.tool_call_id, answered.content) == ("c1", "2")


def test_instructions_and_what_the_input_begins_with_are_one_system_message() -> None:
    developer: JsonValue = {"role": "developer", "content": "Be brief."}
    assert shown(developer, USER, instructions="Count.") == [("system", "Count.\n\nBe brief."), ("user", "a\nb")]
    assert shown(developer, USER) == [("developer", "Be brief."), ("user", "a\nb")]


def test_earlier_messages_come_between_instructions_and_input() -> None:
    earlier = [ChatMessage(role="user", content="before"), ChatMessage(role="assistant", content="yes")]
    assert shown(USER, instructions="Count.", earlier=earlier) == [
        ("system", "Count."),
        ("user", "before"),
        ("assistant", ("yes", [])),
        ("user", "a\nb"),
    ]


def test_reasoning_that_is_text_is_passed_to_the_template_and_encrypted_reasoning_is_not() -> None:
    thought: JsonValue = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}
    hidden: JsonValue = {"type": "reasoning", "encrypted_content": "gAAA", "summary": []}
    for item, expected in ((thought, "hm"), (hidden, None)):
        request = ResponsesRequest.model_validate({"model": "m", "input": [USER, item, CALL]})
        assert [message.reasoning_content for message in chat_of_response(request).messages] == [None, expected]


def test_a_result_ends_the_turn() -> None:
    assert shown(USER, said("x"), CALL, RESULT, said("y")) == [
        ("user", "a\nb"),
        ("assistant", ("x", ["c1"])),
        ("tool", "2"),
        ("assistant", ("y", [])),
    ]


def test_the_effort_of_reasoning_is_that_of_a_chat() -> None:
    for reasoning, effort in (({"effort": "low", "summary": "auto"}, "low"), ({}, None), (None, None)):
        request = ResponsesRequest.model_validate({"model": "m", "input": "hi", "reasoning": reasoning})
        assert chat_of_response(request).reasoning_effort == effort
