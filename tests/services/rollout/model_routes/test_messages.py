"""`/v1/messages` through Anthropic's client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam
from openai import OpenAI
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import extra
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError

QUESTION = "Tom had 12 pens and lost 5 of them. How many pens does Tom still have?"
USER: MessageParam = {"role": "user", "content": QUESTION}
CALCULATOR: ToolParam = {
    "name": "calculator",
    "description": "Counts.",
    "input_schema": {"type": "object", "properties": {}},
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call>'
IDS = {"return_token_ids": True}


@pytest.fixture
def claude(torch_url: str) -> Iterator[Anthropic]:
    """Anthropic's client of the torch engine."""
    with Anthropic(base_url=torch_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(scripted_url: str) -> Iterator[Anthropic]:
    """Anthropic's client of the scripted engine, with the retries it comes with."""
    with Anthropic(base_url=scripted_url, api_key="none", timeout=20) as client:
        yield client


@pytest.fixture
def says(engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    """The scripted engine, which asks for the calculator after a word."""
    engine.says = tokenizer.encode(f"Let me see 🎉.\n{CALL}<|im_end|>", add_special_tokens=False)
    return engine


def shown(content: Any) -> list[object]:
    """Each block's text, or the name and input of its call."""
    return [block.text if block.type == "text" else (block.name, block.input) for block in content]


def test_the_prompt_and_the_tokens_are_those_of_the_same_chat(claude: Anthropic, client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Count.\nWell."}, {"role": "user", "content": QUESTION}],
        tools=[{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}],
        seed=3,
        max_tokens=64,
        extra_body=IDS,
    )
    message = claude.messages.create(
        model="tiny",
        system=[
            {"type": "text", "text": "Count.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Well."},
        ],
        messages=[USER],
        tools=[{"name": "calculator", "input_schema": {"type": "object"}}],
        max_tokens=64,
        extra_body={"seed": 3, **IDS},
    )
    assert extra(message)["prompt_token_ids"] == extra(chat)["prompt_token_ids"]  # pyright: ignore[reportArgumentType]
    assert extra(message)["token_ids"] == extra(chat.choices[0])["token_ids"]  # pyright: ignore[reportArgumentType]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    counted = claude.messages.count_tokens(
        model="tiny",
        system="Count.\nWell.",
        messages=[USER],
        tools=[{"name": "calculator", "input_schema": {"type": "object"}}],
    )
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_the_tiny_model_calls_its_calculator_and_answers_with_the_result(claude: Anthropic) -> None:
    asked = claude.messages.create(
        model="tiny", messages=[USER], tools=[CALCULATOR], extra_body={"temperature": 0}, max_tokens=64
    )
    [call] = asked.content
    assert call.type == "tool_use"
    assert (asked.stop_reason, call.name, list(call.input)) == ("tool_use", "calculator", ["expression"])
    messages: list[MessageParam] = [
        USER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "7"}]},
    ]
    answered = claude.messages.create(
        model="tiny", messages=messages, tools=[CALCULATOR], extra_body={"temperature": 0}, max_tokens=64
    )
    assert (shown(answered.content), answered.stop_reason) == (["#### 7"], "end_turn")


def test_text_and_call_are_blocks_and_the_clients_own_helper_gets_the_same_of_a_stream(
    scripted: Anthropic, says: ScriptedEngine
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": [CALCULATOR], "max_tokens": 99}
    whole = scripted.messages.create(**asked)
    with scripted.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    for message in (whole, final):
        assert shown(message.content) == ["Let me see 🎉.", ("calculator", {"expression": "12-5"})]
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        assert message.usage.output_tokens == len(says.says)
    assert "".join(texts) == "Let me see 🎉."
    assert len(texts) > 3


def test_the_events_are_named_and_in_order(scripted_url: str, says: ScriptedEngine) -> None:
    tools: list[Any] = [CALCULATOR]
    body = {"model": "tiny", "messages": [USER], "tools": tools, "max_tokens": 99, "stream": True}
    *events, rest = httpx.post(f"{scripted_url}/v1/messages", json=body).text.split("\n\n")
    assert rest == ""
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    data = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
    assert names == [item["type"] for item in data]
    deltas = names.count("content_block_delta") - 1
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [item["index"] for item in data if "index" in item] == [0] * (deltas + 2) + [1] * 3
    assert "token_ids" not in data[0]["message"]
    assert "token_ids" not in data[-2]
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_stream_carries_the_ids_at_its_end_when_asked_for(
    scripted_url: str, says: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    body = {"model": "tiny", "messages": [USER], "max_tokens": 99, "stream": True, **IDS}
    end = httpx.post(f"{scripted_url}/v1/messages", json=body).text.split("\n\n")[-3]
    found = json.loads(end.split("\n")[1].removeprefix("data: "))
    assert found["token_ids"] == says.says
    assert found["weight_versions"] == [{"version": 5, "start": 0, "end": len(says.says)}]


def test_a_stop_sequence_is_named(
    scripted: Anthropic, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("one two three<|im_end|>", add_special_tokens=False)
    message = scripted.messages.create(model="tiny", messages=[USER], max_tokens=9, stop_sequences=["ee", " tw"])
    assert (shown(message.content), message.stop_reason, message.stop_sequence) == (["one"], "stop_sequence", " tw")


def test_a_message_cut_by_the_length_says_so(scripted: Anthropic, says: ScriptedEngine) -> None:
    says.says, says.ends = says.says[:-3], "length"
    message = scripted.messages.create(model="tiny", messages=[USER], tools=[CALCULATOR], max_tokens=32000)
    assert message.stop_reason == "max_tokens"


def test_a_choice_of_tools_is_that_of_a_chat(
    scripted: Anthropic, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    begun = {"any": "<tool_call>", "tool": '<tool_call>\n{"name": "calculator", "arguments":'}
    for kind, begin in begun.items():
        engine.says = tokenizer.encode(f"{CALL}\n{CALL}".removeprefix(begin), add_special_tokens=False)
        choice: dict[str, Any] = {"type": kind, "disable_parallel_tool_use": True}
        message = scripted.messages.create(
            model="tiny",
            messages=[USER],
            tools=[CALCULATOR],
            max_tokens=99,
            tool_choice=choice | ({"name": "calculator"} if kind == "tool" else {}),  # pyright: ignore[reportArgumentType]
        )
        assert shown(message.content) == [("calculator", {"expression": "12-5"})]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected tags: 'text', 'tool_use'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}]},
            "expected no tool_use in a message of role user",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "expected one of the tools [], got any"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers: expected nothing or []"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema: Field required"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "an engine that guides its sampling"),
        ({"temprature": 1}, "Extra inputs are not permitted"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(scripted: Anthropic, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        scripted.messages.create(model="tiny", messages=[USER], max_tokens=9, extra_body=fields)
    assert isinstance(raised.value.body, dict)
    assert said in raised.value.body["error"]["message"]
    assert (raised.value.body["type"], raised.value.body["error"]["type"]) == ("error", "invalid_request_error")


def test_what_clients_send_without_effect_is_accepted(scripted: Anthropic, says: ScriptedEngine) -> None:
    message = scripted.messages.create(
        model="tiny",
        max_tokens=9,
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "5", "cache_control": {"type": "ephemeral"}, "citations": None},
                ],
            },
            USER,
        ],
        metadata={"user_id": "1"},
        extra_body={
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
        },
    )
    assert message.stop_reason == "end_turn"


def test_an_error_is_anthropics_and_ours(scripted: Anthropic, says: ScriptedEngine) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        scripted.messages.create(model="claude", messages=[USER], max_tokens=9)
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["error"]["type"] == "not_found_error"
    error = ErrorReply.model_validate(raised.value.body).error
    assert (error.code, error.detail) == ("model_not_found", {"param": "model"})


def test_a_full_engine_is_asked_again(scripted: Anthropic, says: ScriptedEngine) -> None:
    says.refusals = [TrackwayError(ErrorCode.OVERLOADED, "full", retry_after_s=0.1)]
    assert scripted.messages.create(model="tiny", messages=[USER], max_tokens=9).stop_reason == "end_turn"
    assert len(says.calls) == 2


def test_a_failure_on_the_way_is_an_error_of_the_stream(scripted: Anthropic, says: ScriptedEngine) -> None:
    says.breaks_after = 3
    with (
        pytest.raises(anthropic.APIStatusError, match="ZeroDivisionError: the engine broke"),
        scripted.messages.stream(model="tiny", messages=[USER], max_tokens=9) as stream,
    ):
        stream.until_done()
