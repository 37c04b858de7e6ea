"""`/v1/responses` through OpenAI's client."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import FunctionToolParam
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import extra
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.rollout.engines.protocol import Capability

QUESTION = "Tom had 12 pens and lost 5 of them. How many pens does Tom still have?"
CALCULATOR: FunctionToolParam = {
    "type": "function",
    "name": "calculator",
    "description": "Counts.",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call>'
IDS = {"return_token_ids": True}


@pytest.fixture
def says(engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    """The scripted engine, which asks for the calculator after a word."""
    engine.says = tokenizer.encode(f"Let me see 🎉.\n{CALL}<|im_end|>", add_special_tokens=False)
    return engine


def test_the_prompt_and_the_tokens_are_those_of_the_same_chat(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Count."}, {"role": "user", "content": QUESTION}],
        seed=3,
        max_tokens=64,
        extra_body=IDS,
    )
    response = client.responses.create(
        model="tiny", instructions="Count.", input=QUESTION, max_output_tokens=64, extra_body={"seed": 3, **IDS}
    )
    assert extra(response)["prompt_token_ids"] == extra(chat)["prompt_token_ids"]
    assert extra(response)["token_ids"] == extra(chat.choices[0])["token_ids"]
    assert extra(response)["weight_versions"] == extra(chat.choices[0])["weight_versions"]
    assert response.output_text == chat.choices[0].message.content
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert (response.object, response.status, response.id[:5]) == ("response", "completed", "resp_")


def flat(entry: Any) -> list[object]:
    """A token and its likeliest ones, each with its logprob, which is the same up to rounding."""
    pairs = [(other.token, other.logprob) for other in (entry, *entry.top_logprobs)]
    return [part for token, logprob in pairs for part in (token, pytest.approx(logprob, abs=1e-4))]


def test_logprobs_of_a_response_are_those_of_the_same_chat(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": QUESTION}],
        seed=3,
        max_tokens=16,
        logprobs=True,
        top_logprobs=2,
    )
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": QUESTION,
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "extra_body": {"seed": 3},
    }
    response = client.responses.create(**asked)
    events = [*client.responses.create(**asked, stream=True)]

    expected = [flat(entry) for entry in chat.choices[0].logprobs.content or []]
    [part] = [part for item in response.output if item.type == "message" for part in item.content]
    assert part.type == "output_text" and len(expected) == 16
    [done] = [event for event in events if event.type == "response.output_text.done"]
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    for found in (part.logprobs or [], done.logprobs, streamed):
        assert [flat(entry) for entry in found] == expected


def test_a_format_guides_the_answer_and_is_repeated(scripted: OpenAI, says: ScriptedEngine) -> None:
    says.capabilities = frozenset({Capability.STRUCTURED_OUTPUTS})
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    wanted: dict[str, Any] = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = scripted.responses.create(model="tiny", input=QUESTION, extra_body={"text": {"format": wanted}})

    grammar = says.calls[-1].structured_outputs
    assert grammar is not None and grammar.json_schema == schema
    assert response.text is not None and response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == wanted


def test_the_tiny_model_calls_its_calculator_and_answers_with_the_result(client: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    asked = client.responses.create(model="tiny", input=items, tools=[CALCULATOR], temperature=0)
    [call] = asked.output
    assert call.type == "function_call"
    assert (call.name, list(json.loads(call.arguments))) == ("calculator", ["expression"])
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
    answered = client.responses.create(model="tiny", input=items, tools=[CALCULATOR], temperature=0)
    assert answered.output_text == "#### 7"


def test_logprobs_beside_tools_are_those_of_the_texts_tokens(
    scripted: OpenAI, says: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": QUESTION,
        "tools": [CALCULATOR],
        "include": ["message.output_text.logprobs"],
    }
    whole = scripted.responses.create(**asked)
    events = [*scripted.responses.create(**asked, stream=True)]

    text = "Let me see 🎉."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert says.says[: len(ids)] == ids
    expected = [tokenizer.decode([token]) for token in ids]
    message, call = whole.output
    assert (message.type, call.type) == ("message", "function_call")
    [part] = message.content
    assert part.type == "output_text" and part.text == text
    [done] = [event for event in events if event.type == "response.output_text.done"]
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    for found in (part.logprobs or [], done.logprobs, streamed):
        assert [entry.token for entry in found] == expected
        assert [entry.logprob for entry in found] == [-(place + 1) / 8 for place in range(len(ids))]


def test_text_and_call_are_items_and_the_streams_last_event_has_the_same(
    scripted: OpenAI, says: ScriptedEngine
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": QUESTION, "tools": [CALCULATOR]}
    whole = scripted.responses.create(**asked)
    with scripted.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for response in (whole, final):
        message, call = response.output
        assert message.type == "message"
        assert [part.text for part in message.content if part.type == "output_text"] == ["Let me see 🎉."]
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("calculator", '{"expression": "12-5"}', "completed")
        assert response.usage is not None
        assert response.usage.output_tokens == len(says.says)
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.output_index for event in events if "output_index" in type(event).model_fields] == [0] * (  # pyright: ignore
        deltas + 5
    ) + [1] * 4


def test_a_response_cut_by_the_length_is_incomplete(scripted: OpenAI, says: ScriptedEngine) -> None:
    says.ends, says.says = "length", says.says[:5]
    response = scripted.responses.create(model="tiny", input=QUESTION, max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    kinds = [event.type for event in scripted.responses.create(model="tiny", input=QUESTION, stream=True)]
    assert kinds[-1] == "response.incomplete"


def test_top_p_0_decodes_greedily(scripted: OpenAI, says: ScriptedEngine) -> None:
    scripted.responses.create(model="tiny", input=QUESTION, top_p=0, temperature=0.5)
    scripted.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "1"}], top_p=0)
    assert [(call.temperature, call.top_p) for call in says.calls] == [(0.0, 1.0), (0.0, 1.0)]


def test_ids_are_sent_only_when_asked_for(scripted: OpenAI, says: ScriptedEngine) -> None:
    for wanted in (True, False):
        body = {"return_token_ids": wanted}
        whole = scripted.responses.create(model="tiny", input=QUESTION, extra_body=body)
        *_, last = scripted.responses.create(model="tiny", input=QUESTION, stream=True, extra_body=body)
        assert last.type == "response.completed"
        for response in (whole, last.response):
            assert extra(response).get("token_ids") == (says.says if wanted else None)
            assert ("token_ids" in extra(response)) is wanted


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "this service stores no response"),
        ({"tools": [{"type": "web_search"}]}, "tools", "Input should be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "expected one of the tools [], got required"),
        ({"background": True}, "background", "expected nothing or False, got True: unsupported"),
        ({"truncation": "auto"}, "truncation", "unsupported"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format", "Field required"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format", "an engine that guides its sampling"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "got item_reference; send the item itself"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "content"),
        ({"temprature": 1}, "temprature", "Extra inputs are not permitted"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "ask /v1/chat/completions of the rollout service"),
        ({"model": "gpt"}, "model", "expected a policy that is served here (tiny, base), got 'gpt'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    scripted: OpenAI, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        scripted.responses.create(**{"model": "tiny", "input": "1", "extra_body": fields})
    assert said in raised.value.message
    assert (raised.value.status_code, raised.value.param) == (404 if "model" in fields else 400, param)


def test_what_clients_send_without_effect_is_accepted(scripted: OpenAI, says: ScriptedEngine) -> None:
    body = {"client_metadata": {"a": "b"}, "prompt_cache_key": "k", "text": {"verbosity": "low"}}
    response = scripted.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "1"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": "2"},  # pyright: ignore
            {"role": "user", "content": "3"},
        ],
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        store=False,
        parallel_tool_calls=True,
        truncation="disabled",
        extra_body=body,
    )
    assert response.output_text == f"Let me see 🎉.\n{CALL}"


def test_a_failure_on_the_way_is_an_error_of_the_stream(scripted: OpenAI, says: ScriptedEngine) -> None:
    says.breaks_after = 3
    with pytest.raises(openai.APIError, match="ZeroDivisionError: the engine broke") as raised:
        list(scripted.responses.create(model="tiny", input="1", stream=True))
    assert raised.value.code == "internal"


def test_each_event_has_its_name_and_the_stream_ends_with_the_response(scripted_url: str, says: ScriptedEngine) -> None:
    body = {"model": "tiny", "input": "1", "stream": True}
    *events, rest = httpx.post(f"{scripted_url}/v1/responses", json=body).text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1].startswith("event: response.completed\n")
