"""Chat templates of other families: each carries tools token-exact, or is refused by name."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.chat.families import FAMILIES
from trackway.chat.tokens import ChatTokens
from trackway.wire.chat import FunctionSchema, Message, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.anyio

ADD = ToolSchema(function=FunctionSchema(name="add", parameters={"type": "object", "properties": {}}))
QUESTION = Message(role="user", content="9+9?")
MORE = Message(role="user", content="And 1+1?")
REMEDY = "give the tokenizer a template with tools, or run an agent without tools"
LACKS = {
    "qwen": "",
    "llama3": "",
    "mistral": "",
    "mistral_v1": "leaves out the schemas of tools and rejects the results of tools (Conversation roles must alternate "
    "user/assistant/user/assistant/...)",
    "gemma": "leaves out the schemas of tools and rejects the results of tools (",
    "phi3": "leaves out the schemas of tools and leaves out the results of tools",
    "vicuna": "leaves out the schemas of tools",
}


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def result(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="call00000", name="add")


@pytest.mark.parametrize("family", FAMILIES)
async def test_templates_without_tools_are_refused_by_name(family: str) -> None:
    tokens = ChatTokens(FAMILIES[family].tokenizer())
    if not LACKS[family]:
        assert tokens.support == ("", "")
        assert await tokens.prompt([QUESTION], [ADD], 4096)
        return

    with pytest.raises(TrackwayError) as caught:
        await tokens.prompt([QUESTION], [ADD], 4096)

    start = f"expected a chat template that shows tools and their results, got one that {LACKS[family]}"
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_REQUEST, {"param": "tools"})
    assert caught.value.message.startswith(start) and caught.value.message.endswith(REMEDY)


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_answer_without_tools_ends_in_every_family(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    tokens = ChatTokens(tokenizer)

    assert await tokens.turn_text(encoded(tokenizer, f"It is 18{FAMILIES[family].end}")) == "It is 18"
    assert await tokens.turn_text(encoded(tokenizer, "It is 1")) == "It is 1"


@pytest.mark.parametrize("family", FAMILIES)
async def test_appended_ids_equal_the_rendering_of_the_whole_conversation(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    tokens = ChatTokens(tokenizer)
    later = [MORE] if tokens.support.lacks_results else [result("18")]
    tools = [] if tokens.support.lacks else [ADD]
    if family == "mistral":
        tools = []  # its template moves the schemas to the last question
    conversation = [QUESTION, Message(role="assistant", content="Let me see."), *later]
    whole = await tokens.prompt(conversation, tools, 4096)

    prompt = await tokens.prompt([QUESTION], tools, 4096)
    behind = await tokens.observation(later, [])

    written = whole[len(prompt) : len(whole) - len(behind)]
    assert prompt + written + behind == whole
    assert (await tokens.text(written)).strip() == "Let me see."
    assert (
        await tokens.observation(later, [*written, behind[0]]) == behind[behind[0] in tokenizer.added_tokens_decoder :]
    )


async def test_no_mark_stands_before_what_follows_an_answer() -> None:
    tokenizer = FAMILIES["vicuna"].tokenizer()

    behind = await ChatTokens(tokenizer).observation([result("18")], [])

    pieces = tokenizer.convert_ids_to_tokens(behind)
    assert pieces == ["<0x0A>", *"TOOL:▁18", "<0x0A>", *"ASSISTANT:"]
    assert tokenizer.tokenize("\nTOOL: 18")[0] == "▁"


@pytest.mark.parametrize(
    ("family", "messages", "words"),
    [
        ("gemma", [Message(role="system", content="Be brief."), QUESTION], "System role not supported"),
        ("gemma", [QUESTION, MORE], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ("mistral_v1", [QUESTION, MORE], "Conversation roles must alternate user/assistant/user/assistant/..."),
        (
            "mistral",
            [QUESTION, MORE],
            "After the optional system message, roles must alternate user/assistant/user/assistant/...",
        ),
    ],
)
async def test_messages_that_a_family_rejects_are_an_invalid_request(
    family: str, messages: list[Message], words: str
) -> None:
    with pytest.raises(TrackwayError) as caught:
        await ChatTokens(FAMILIES[family].tokenizer()).prompt(messages, [], 4096)

    message = f"messages: the model's chat template rejects them: {words}; send messages that it supports"
    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID_REQUEST, message)


@pytest.mark.parametrize("family", ["mistral_v1", "gemma", "phi3"])
async def test_a_tools_result_is_never_dropped_without_a_word(family: str) -> None:
    with pytest.raises(TrackwayError, match="expected a chat template that shows tools and their results") as caught:
        await ChatTokens(FAMILIES[family].tokenizer()).following([{"role": "tool", "content": "18"}], [])

    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_REQUEST, {"param": "messages"})


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_answer_written_for_training_equals_its_part_of_the_whole_conversation(family: str) -> None:
    tokens = ChatTokens(FAMILIES[family].tokenizer())
    answer, later = Message(role="assistant", content="Let me see."), [MORE]
    whole = await tokens.prompt([QUESTION, answer, *later], [], 4096)

    prompt, written = await tokens.prompt([QUESTION], [], 4096), await tokens.written(answer)
    behind = await tokens.observation(later, written)

    if family == "vicuna":  # its template ends a turn without a token, so that a rollout has the end of text there
        assert written.pop() == tokens.fast.eos_token_id
    assert prompt + written + behind == whole
