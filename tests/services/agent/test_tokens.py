import pytest
from scripted_model import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from trackway.agent.tokens import ChatTokens
from trackway.wire.chat import FunctionCall, FunctionSchema, Message, ToolCall, ToolSchema

ADD = ToolSchema(function=FunctionSchema(name="add", parameters={"type": "object", "properties": {}}))
QUESTION = Message(role="user", content="9+9?")


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
    ids = await tokens.observation(["18"], encoded(tokenizer, "x<|im_end|>"))

    assert ids == encoded(tokenizer, "\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.anyio
async def test_a_turn_that_was_cut_is_ended_by_the_glue(tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = await tokens.observation(["a", "b"], encoded(tokenizer, "x</tool_call>"))

    text = "<|im_end|>\n<|im_start|>tool\na<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n"
    assert ids == encoded(tokenizer, text)


@pytest.mark.anyio
async def test_qwen_wraps_tool_results_in_one_user_turn(qwen_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = await ChatTokens(qwen_tokenizer).observation(["a", "b"], encoded(qwen_tokenizer, "x<|im_end|>"))

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

    grown = await tokens.prompt([QUESTION], [ADD], 4096) + said + await tokens.observation(["18"], said)

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
async def test_arguments_of_earlier_calls_reach_the_template_as_an_object() -> None:
    tokenizer = byte_tokenizer(
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    )
    past = ToolCall(id="c", function=FunctionCall(name="add", arguments='{"a": 1}'))

    ids = await ChatTokens(tokenizer).prompt([Message(role="assistant", content="", tool_calls=[past])], [], 4096)

    assert tokenizer.decode(ids) == '{"a": 1}'


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    tokenizer = byte_tokenizer("")
    tokenizer.chat_template = None

    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        ChatTokens(tokenizer)
