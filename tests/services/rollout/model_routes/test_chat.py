"""`/v1/chat/completions` through OpenAI's client."""

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import calls, extra
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine

IDS = {"return_token_ids": True}
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tom had 12 pens and lost 5 of them. How many pens does Tom still have?"}
]
CALCULATOR: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "calculator", "description": "Counts.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call>'


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, object]], behind: str = "") -> list[int]:
    """The conversation by the model's template, with the calculator."""
    text = tokenizer.apply_chat_template(
        messages,  # pyright: ignore[reportArgumentType]
        tools=[dict(CALCULATOR)],
        add_generation_prompt=True,
        tokenize=False,
    )
    return tokenizer.encode(str(text) + behind, add_special_tokens=False)


@pytest.fixture
def says(engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase) -> ScriptedEngine:
    """The scripted engine, which asks for the calculator after a word."""
    engine.says = tokenizer.encode(f"Let me see 🎉.\n{CALL}<|im_end|>", add_special_tokens=False)
    return engine


def test_the_prompt_is_the_models_chat_template_and_the_tokens_are_those_of_generate(
    client: OpenAI, torch_url: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[CALCULATOR], seed=3, max_tokens=64, logprobs=True, extra_body=IDS
    )
    prompt = rendered(tokenizer, [dict(message) for message in QUESTION])
    params = {"seed": 3, "max_tokens": 64}
    ours = httpx.post(f"{torch_url}/generate", json={"token_ids": prompt, "sampling_params": params}).json()
    choice = ours["choices"][0]
    assert extra(answer)["prompt_token_ids"] == prompt
    assert extra(answer.choices[0])["token_ids"] == choice["token_ids"]
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content or []]
    assert logprobs == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-5)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(choice["token_ids"])
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")


def test_the_likeliest_tokens_stand_beside_the_sampled_ones(
    client: OpenAI, torch_url: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, seed=3, max_tokens=16, logprobs=True, top_logprobs=4, extra_body=IDS
    )
    params = {"seed": 3, "max_tokens": 16, "logprobs": 4}
    body = {"token_ids": extra(answer)["prompt_token_ids"], "sampling_params": params}
    ours = httpx.post(f"{torch_url}/generate", json=body).json()["choices"][0]["logprobs"]["content"]
    content = answer.choices[0].logprobs.content or []
    assert len(content) == len(ours) == len(extra(answer.choices[0])["token_ids"])
    for entry, expected in zip(content, ours, strict=True):
        top = [(other["token_id"], other["logprob"]) for other in expected["top_logprobs"]]
        assert (expected["token_id"], expected["logprob"]) in top and len(top) == 4
        assert [other.token for other in entry.top_logprobs] == [tokenizer.decode([token]) for token, _ in top]
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx([value for _, value in top], abs=1e-5)
        assert entry.logprob == pytest.approx(expected["logprob"], abs=1e-5)


def test_the_tiny_model_calls_its_calculator_and_answers_with_the_result(client: OpenAI) -> None:
    messages = [*QUESTION]
    asked = client.chat.completions.create(model="tiny", messages=messages, tools=[CALCULATOR], temperature=0)
    message = asked.choices[0].message
    [(name, arguments)] = calls(message)
    assert asked.choices[0].finish_reason == "tool_calls"
    assert (message.content, name, list(json.loads(arguments))) == (None, "calculator", ["expression"])
    result = {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "7"}
    messages += [message, result]  # pyright: ignore[reportAssignmentType, reportOperatorIssue]  as the client's guide does
    answered = client.chat.completions.create(model="tiny", messages=messages, tools=[CALCULATOR], temperature=0)
    assert answered.choices[0].message.content == "#### 7"
    assert (answered.choices[0].finish_reason, answered.choices[0].message.tool_calls) == ("stop", None)


def test_a_call_is_read_out_of_the_text(scripted: OpenAI, says: ScriptedEngine) -> None:
    answer = scripted.chat.completions.create(model="tiny", messages=QUESTION, tools=[CALCULATOR])
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.role, choice.message.content) == (
        "tool_calls",
        "assistant",
        "Let me see 🎉.",
    )
    assert calls(choice.message) == [("calculator", '{"expression": "12-5"}')]
    assert len((choice.message.tool_calls or [])[0].id) == 9
    assert answer.usage.completion_tokens == len(says.says)


def test_a_streamed_call_is_put_together_by_the_clients_own_helper(scripted: OpenAI, says: ScriptedEngine) -> None:
    with scripted.chat.completions.stream(
        model="tiny", messages=QUESTION, tools=[CALCULATOR], stream_options={"include_usage": True}
    ) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    message = answer.choices[0].message
    assert "".join(texts) == message.content == "Let me see 🎉."
    assert " 🎉" in texts
    assert calls(message) == [("calculator", '{"expression": "12-5"}')]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(says.says)


def test_a_stream_carries_ids_and_logprobs_of_every_token(
    scripted: OpenAI, says: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    chunks = list(
        scripted.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[CALCULATOR], logprobs=True, stream=True, extra_body=IDS
        )
    )
    choices = [chunk.choices[0] for chunk in chunks]
    ids = [token for choice in choices for token in extra(choice)["token_ids"]]
    logprobs = [entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert ids == says.says
    assert logprobs == [-(place + 1) / 8 for place in range(len(ids))]
    assert extra(chunks[0])["prompt_token_ids"] == rendered(tokenizer, [dict(QUESTION[0])])
    assert not any("prompt_token_ids" in extra(chunk) for chunk in chunks[1:])
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)


def test_without_tools_or_with_none_a_call_stays_text(
    scripted: OpenAI, says: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = scripted.chat.completions.create(model="tiny", messages=QUESTION, extra_body=IDS)
    none = scripted.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[CALCULATOR], tool_choice="none", extra_body=IDS
    )
    for answer in (plain, none):
        assert answer.choices[0].message.content == f"Let me see 🎉.\n{CALL}"
        assert (answer.choices[0].finish_reason, answer.choices[0].message.tool_calls) == ("stop", None)
    assert extra(plain)["prompt_token_ids"] == extra(none)["prompt_token_ids"]
    assert "calculator" not in tokenizer.decode(extra(none)["prompt_token_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_stays_text(
    scripted: OpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase, stream: bool
) -> None:
    text = 'Hm. <tool_call>{"name": "calculator", "arguments": [}</tool_call>'
    engine.says = tokenizer.encode(text, add_special_tokens=False)
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": [CALCULATOR]}
    if stream:
        chunks = [chunk.choices[0] for chunk in scripted.chat.completions.create(**asked, stream=True)]
        assert "".join(choice.delta.content or "" for choice in chunks) == text
        assert chunks[-1].finish_reason == "stop"
    else:
        choice = scripted.chat.completions.create(**asked).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")


def test_a_required_call_is_begun_in_the_prompt(
    scripted: OpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    begun = {
        "required": "<tool_call>",
        "calculator": '<tool_call>\n{"name": "calculator", "arguments":',
    }
    for choice, begin in begun.items():
        engine.says = tokenizer.encode(CALL.removeprefix(begin), add_special_tokens=False)
        named = {"type": "function", "function": {"name": choice}}
        answer = scripted.chat.completions.create(  # pyright: ignore[reportCallIssue]
            model="tiny",
            messages=QUESTION,
            tools=[CALCULATOR],
            tool_choice=choice if choice == "required" else named,  # pyright: ignore[reportArgumentType]
            extra_body=IDS,
        )
        assert calls(answer.choices[0].message) == [("calculator", '{"expression": "12-5"}')]
        assert extra(answer)["prompt_token_ids"] == rendered(tokenizer, [dict(QUESTION[0])], begin)
        assert extra(answer.choices[0])["token_ids"] == engine.says


def test_one_call_is_kept_when_parallel_calls_are_off(
    scripted: OpenAI, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode(f"{CALL}\n{CALL}", add_special_tokens=False)
    for parallel, count in ((True, 2), (False, 1)):
        answer = scripted.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[CALCULATOR], parallel_tool_calls=parallel
        )
        assert len(calls(answer.choices[0].message)) == count


def test_a_call_cut_by_the_length_is_text_and_says_so(
    scripted: OpenAI, says: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    says.says, says.ends = says.says[:-3], "length"
    choice = scripted.chat.completions.create(model="tiny", messages=QUESTION, tools=[CALCULATOR]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == tokenizer.decode(says.says)


def test_messages_reach_the_template_as_it_wants_them(
    scripted: OpenAI, says: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression":"1"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": None},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    answer = scripted.chat.completions.create(  # pyright: ignore[reportCallIssue]
        model="tiny",
        messages=messages,  # pyright: ignore[reportArgumentType]
        tools=[CALCULATOR],
        extra_body=IDS,
    )
    shown = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {**call["function"], "arguments": {"expression": "1"}}}],
        },
        {"role": "tool", "content": "1"},
    ]
    assert extra(answer)["prompt_token_ids"] == rendered(tokenizer, shown)


def test_as_many_tokens_as_the_model_has_room_for_unless_told(scripted: OpenAI, says: ScriptedEngine) -> None:
    answer = scripted.chat.completions.create(model="tiny", messages=QUESTION)
    scripted.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=9)
    scripted.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=9, max_completion_tokens=8)
    assert [call.max_tokens for call in says.calls] == [1024 - answer.usage.prompt_tokens, 9, 8]


def test_choices_draw_with_seeds_of_their_own(scripted: OpenAI, says: ScriptedEngine) -> None:
    answer = scripted.chat.completions.create(model="tiny", messages=QUESTION, n=3, seed=7)
    scripted.chat.completions.create(model="tiny", messages=QUESTION, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [call.seed for call in says.calls] == [7, 8, 9, None, None]


def test_a_token_that_is_a_part_of_a_character_has_no_bytes(scripted: OpenAI, says: ScriptedEngine) -> None:
    logprobs = scripted.chat.completions.create(model="tiny", messages=QUESTION, logprobs=True).choices[0].logprobs
    parts = [entry for entry in logprobs.content or [] if entry.bytes is None]
    assert [entry.token for entry in parts] == ["\ufffd"] * 4
    assert bytes(byte for entry in logprobs.content or [] for byte in entry.bytes or []).startswith(b"Let me see .\n")
