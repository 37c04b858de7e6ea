"""Anthropic's messages as chat messages."""

import pytest
from pydantic import JsonValue

from trackway.model_api.anthropic import chat_of_messages
from trackway.wire.anthropic import MessagesRequest

TEXT: JsonValue = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
OTHER: JsonValue = {"type": "text", "text": "b"}
CALL: JsonValue = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": "é"}}
RESULT: JsonValue = {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, OTHER], "is_error": True}
EMPTY: JsonValue = {"type": "tool_result", "tool_use_id": "c2"}
USER: JsonValue = {"role": "user", "content": "hi"}


def shown(*messages: JsonValue, **fields: JsonValue) -> list[tuple[str, object]]:
    """Role and content of each message; a call's arguments and a result's id beside them."""
    body: dict[str, JsonValue] = {"model": "m", "max_tokens": 1, "messages": list(messages), **fields}
    chat = chat_of_messages(MessagesRequest.model_validate(body))
    return [
        (message.role, message.content)
        if message.role not in ("assistant", "tool")
        else (message.role, message.content, message.tool_call_id or [c.function.arguments for c in message.tool_calls])
        for message in chat.messages
    ]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("content", "made"),
    [
        ([TEXT, OTHER], [("user", "a\nb")]),
        ([RESULT, EMPTY, TEXT], [("tool", "a\nb", "c1"), ("tool", "", "c2"), ("user", "a")]),
        ([TEXT, RESULT, OTHER], [("user", "a"), ("tool", "a\nb", "c1"), ("user", "b")]),
    ],
)
def test_results_are_tool_messages_and_texts_are_user_messages_in_order(
    content: list[JsonValue], made: list[tuple[str, ...]]
) -> None:
    assert shown({"role": "user", "content": content}) == made


def test_the_blocks_of_the_model_are_one_message() -> None:
    assert shown(USER, {"role": "assistant", "content": [TEXT, CALL, OTHER]}, USER) == [
        ("user", "hi"),
        ("assistant", "ab", ['{"a": "é"}']),
        ("user", "hi"),
    ]


def test_system_blocks_and_a_system_message_behind_them_are_one_system_message() -> None:
    system: JsonValue = {"role": "system", "content": [OTHER]}
    assert shown(system, USER, system=[TEXT]) == [("system", "a\n\nb"), ("user", "hi")]
    assert shown(USER, system, system="s")[-1] == ("system", "b")


def test_sampling_and_tools_keep_their_meaning() -> None:
    body: dict[str, JsonValue] = {
        "model": "m",
        "max_tokens": 7,
        "messages": [USER],
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "seed": 4,
        "stop_sequences": ["x"],
        "output_config": {"effort": "low"},
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    }
    chat = chat_of_messages(MessagesRequest.model_validate(body))
    assert (chat.max_completion_tokens, chat.temperature, chat.top_p, chat.top_k, chat.seed, chat.stop) == (
        7,
        0.5,
        0.25,
        3,
        4,
        ["x"],
    )
    assert chat.reasoning_effort == "low"
    assert chat.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"}) == {
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
    }
