import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from tests.services.agent.scripted_model import CHATML, END, byte_tokenizer
from trackway.chat.tokens import ChatTokens
from trackway.wire.chat import FunctionCall, FunctionSchema, Message, ToolCall, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

ADD = ToolSchema(function=FunctionSchema(name="add", parameters={"type": "object", "properties": {}}))
QUESTION = Message(role="user", content="9+9?")


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.anyio
async def test_the_prompt_is_what_the_chat_template_tokenises(
    tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = await tokens.prompt([QUESTION], [ADD], 4096)

    text = "<|im_start|>system\nTools: add<|im_end|>\n<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "9+9?"}], tools=[ADD.model_dump()], add_generation_prompt=True, return_dict=False
    )
    assert ids == encoded(tokenizer, text) == plain


@pytest.mark.anyio
async def test_an_observation_brings_the_newline_behind_the_turn_the_model_ended(
    tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = await tokens.observation([tool("18")], encoded(tokenizer, "x<|im_end|>"))

    assert ids == encoded(tokenizer, "\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.anyio
async def test_a_turn_that_was_cut_is_ended_by_the_glue(tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = await tokens.observation([tool("a"), tool("b")], encoded(tokenizer, "x</tool_call>"))

    text = "<|im_end|>\n<|im_start|>tool\na<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n"
    assert ids == encoded(tokenizer, text)


@pytest.mark.anyio
async def test_qwen_wraps_tool_results_in_one_user_turn(qwen_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = await ChatTokens(qwen_tokenizer).observation([tool("a"), tool("b")], encoded(qwen_tokenizer, "x<|im_end|>"))

    text = (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids == encoded(qwen_tokenizer, text)


@pytest.mark.anyio
@pytest.mark.parametrize("template", ["tokenizer", "qwen_tokenizer"])
async def test_appending_gives_what_the_template_gives_for_the_whole_conversation(
    template: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: PreTrainedTokenizerFast = request.getfixturevalue(template)
    tokens = ChatTokens(tokenizer)
    said = encoded(tokenizer, "let me add<|im_end|>")

    grown = await tokens.prompt([QUESTION], [ADD], 4096) + said + await tokens.observation([tool("18")], said)

    conversation = [QUESTION, Message(role="assistant", content="let me add"), Message(role="tool", content="18")]
    assert grown == await tokens.prompt(conversation, [ADD], 4096)


@pytest.mark.anyio
async def test_text_keeps_special_tokens_and_plain_text_keeps_only_tool_calls(
    tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = encoded(tokenizer, "<tool_call>{}</tool_call><|im_end|>")

    assert await tokens.text(ids) == "<tool_call>{}</tool_call><|im_end|>"
    assert await tokens.turn_text(ids) == await tokens.plain_text(ids) == "<tool_call>{}</tool_call>"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("written", "text"),
    [("", ""), ("x", "x"), ("x" + END, "x"), ("x<|endoftext|>", "x"), ("x<|im_start|>", "x<|im_start|>")],
)
async def test_a_turn_is_shown_without_the_token_that_ends_turns_or_texts(written: str, text: str) -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.eos_token = "<|endoftext|>"

    assert await ChatTokens(tokenizer).turn_text(encoded(tokenizer, written)) == text


@pytest.mark.anyio
async def test_each_token_lies_at_its_characters(tokens: ChatTokens) -> None:
    assert await tokens.places("aéb") == [(0, 1), (1, 2), (1, 2), (2, 3)]


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python, which knows no places."""

    @property
    def vocab_size(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(128)}

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)


@pytest.mark.anyio
async def test_a_tokenizer_that_knows_no_places_is_refused_by_name() -> None:
    slow: Any = Letters(chat_template="{{ messages[1].content }}|", name_or_path="letters")

    with pytest.raises(TrackwayError) as caught:
        await ChatTokens(slow).places("a")

    assert (caught.value.code, caught.value.message) == (
        ErrorCode.INVALID_REQUEST,
        "max_tool_response_tokens: expected a fast tokenizer, got that of letters; limit characters instead",
    )


@pytest.mark.anyio
async def test_a_token_that_the_tokenizer_puts_before_every_text_stays_away(tokens: ChatTokens) -> None:
    tokenizer = byte_tokenizer(CHATML)
    [start] = encoded(tokenizer, "<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", start)])
    assert tokenizer.encode("a") == [start, *encoded(tokenizer, "a")]

    eager = ChatTokens(tokenizer)

    assert await eager.prompt([QUESTION], [], 4096) == await tokens.prompt([QUESTION], [], 4096)
    assert await eager.observation([tool("18")], []) == await tokens.observation([tool("18")], [])
    assert await eager.places("ab") == [(0, 1), (1, 2)]


@pytest.mark.anyio
async def test_ids_that_are_kept_count_four_characters_each_beside_their_text(tokens: ChatTokens) -> None:
    conversation, tools = json.dumps([{"role": "user", "content": "9+9?"}]), json.dumps([ADD.model_dump(mode="json")])
    messages = to_json([{"role": "tool", "content": text} for text in ("18", "x")])

    prompt = await tokens.prompt([QUESTION], [ADD], 4096)
    behind = await tokens.observation([tool("18"), tool("x")], [])

    kept: list[Any] = [tokens._prompt.cache, tokens._behind.cache]
    assert [cache.currsize for cache in kept] == [
        4 * len(prompt) + len(conversation) + len(tools),
        4 * len(behind) + len(messages),
    ]
    assert [cache.maxsize for cache in kept] == [16 * 1024 * 1024] * 2


@pytest.mark.anyio
@pytest.mark.parametrize(("chars", "aside"), [(100, False), (20_000, True)])
async def test_long_schemas_are_rendered_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, chars: int, aside: bool
) -> None:
    tokenizer, threads = byte_tokenizer(CHATML), []
    render = tokenizer.apply_chat_template

    def noted(*args: Any, **kwargs: Any) -> object:
        threads.append(threading.current_thread())
        return render(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noted)
    long = ToolSchema(function=FunctionSchema(name="add", description="x" * chars, parameters={}))

    tokens = ChatTokens(tokenizer)
    assert tokens.support == ("", "")
    threads.clear()
    ids = await tokens.prompt([QUESTION], [long], 4096)

    assert [thread is not threading.main_thread() for thread in threads] == [aside]
    assert ids == await ChatTokens(byte_tokenizer(CHATML)).prompt([QUESTION], [long], 4096)


@pytest.mark.anyio
async def test_variables_of_the_template_are_those_of_the_tokenizer_or_of_the_call() -> None:
    tokenizer = byte_tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}[{{ mood }}]")
    tokens = ChatTokens(tokenizer, {"mood": "calm"})
    more = [{"role": "user", "content": "more"}]

    shown = [
        await tokens.prompt([QUESTION], [], 4096),
        await tokens.observation([tool("18")], []),
        await tokens.following(more, [], {"mood": "busy"}),
        await tokens.following(more, [], {}),
    ]

    assert [tokenizer.decode(ids) for ids in shown] == ["9+9?[calm]", "18[calm]", "more[busy]", "more[]"]
    assert (tokens.tokenizer is tokenizer, tokens.template_kwargs) == (True, {"mood": "calm"})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ("raise_exception('no more here')", "no more here"),
        ("1 + messages[-1].content", "unsupported operand type(s) for +: 'int' and 'str'"),
    ],
)
async def test_messages_that_the_template_rejects_are_an_invalid_request(refusal: str, reason: str) -> None:
    template = "{% if messages | length == 4 %}{{ REFUSAL }}{% endif %}".replace("REFUSAL", refusal) + CHATML

    with pytest.raises(TrackwayError) as caught:
        await ChatTokens(byte_tokenizer(template)).observation([tool("18"), tool("x")], [])

    assert (caught.value.code, caught.value.detail, caught.value.message) == (
        ErrorCode.INVALID_REQUEST,
        {"param": "messages"},
        f"messages: the model's chat template rejects them: {reason}; send messages that it supports",
    )


@pytest.mark.anyio
@pytest.mark.parametrize("template", ["nothing", "{{ messages[1].content }}"], ids=["no content", "nothing behind it"])
async def test_a_template_that_shows_no_end_of_a_turn_is_refused(template: str) -> None:
    with pytest.raises(TrackwayError, match="does not show the assistant's content; use one that does"):
        await ChatTokens(byte_tokenizer(template)).following([{"role": "user", "content": "9+9?"}], [])


@pytest.mark.anyio
async def test_arguments_of_earlier_calls_reach_the_template_as_an_object() -> None:
    tokenizer = byte_tokenizer(
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    )
    past = ToolCall(id="c", function=FunctionCall(name="add", arguments='{"a": 1}'))

    ids = await ChatTokens(tokenizer).prompt([Message(role="assistant", content="", tool_calls=[past])], [], 4096)

    assert tokenizer.decode(ids) == '{"a": 1}'


@pytest.mark.anyio
async def test_a_tokenizer_is_loaded_from_its_folder(tokens: ChatTokens, model_path: Path) -> None:
    loaded = ChatTokens.load(str(model_path))
    assert await loaded.prompt([QUESTION], [ADD], 4096) == await tokens.prompt([QUESTION], [ADD], 4096)


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    tokenizer = byte_tokenizer("")
    tokenizer.chat_template = None

    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        ChatTokens(tokenizer)
