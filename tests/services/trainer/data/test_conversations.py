"""Rows of supervised training: what a file may have, and the ids and masks that become of it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import JsonValue
from transformers import AutoTokenizer

from tests.services.agent.scripted_model import QWEN, byte_tokenizer
from trackway.chat.tokens import ChatTokens
from trackway.deploy.bundled import TINY_MODEL
from trackway.run_config.models import DataConfig
from trackway.trainer.data.conversations import EncodedRow, encoded, load_conversations
from trackway.trainer.data.dataset import ALL_ROWS, RowChoice
from trackway.wire.errors import ErrorCode, TrackwayError

CALL = {"name": "calculator", "arguments": {"expression": "12-5"}}
TOOLS: list[JsonValue] = [{"type": "function", "function": {"name": "calculator"}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "#### 7"},
]
PROMPT = "<|im_start|>system\nTools: calculator<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n"
ANSWERS = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12-5"}}\n</tool_call><|im_end|>',
    "#### 7<|im_end|>",
)


@pytest.fixture(scope="module")
def tokens() -> ChatTokens:
    return ChatTokens.load(str(TINY_MODEL))


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ids_of(file: str, tokens: ChatTokens, **keys: Any) -> list[EncodedRow]:
    data = DataConfig(**keys)
    return encoded(load_conversations([file], ALL_ROWS, data), tokens, data)


def pieces(row: EncodedRow, tokens: ChatTokens) -> list[tuple[str, int]]:
    """The text of each stretch of tokens with one mask."""
    found: list[tuple[list[int], int]] = []
    for token, mask in zip(row.ids, row.mask, strict=True):
        if not found or found[-1][1] != mask:
            found.append(([], mask))
        found[-1][0].append(token)
    return [(tokens.fast.decode(ids, skip_special_tokens=False), mask) for ids, mask in found]


def test_only_what_the_assistant_writes_is_trained_with_the_token_that_ends_its_turn(tmp_path, tokens):
    [row] = ids_of(jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES, "tools": TOOLS}), tokens)

    assert pieces(row, tokens) == [
        (f"{PROMPT}<|im_start|>assistant\n", 0),
        (ANSWERS[0], 1),
        ("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n", 0),
        (ANSWERS[1], 1),
    ]
    texts = [text for text, _ in pieces(row, tokens)]
    encode = AutoTokenizer.from_pretrained(TINY_MODEL).encode
    assert list(row.ids) == [token for text in texts for token in encode(text, add_special_tokens=False)]


def test_a_conversation_ends_with_its_last_answer_and_a_row_without_tools_describes_none(tmp_path, tokens):
    asked = [*MESSAGES[:1], {"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]

    [row] = ids_of(jsonl(tmp_path / "rows.jsonl", {"talk": asked}), tokens, messages_key="talk")

    prompt = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert pieces(row, tokens) == [(prompt, 0), ("7<|im_end|>", 1)]


def test_parquet_rows_have_the_same_ids_with_arguments_and_tools_as_text_or_as_objects(tmp_path, tokens):
    as_text = json.loads(json.dumps(MESSAGES))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["arguments"])
    tables = {
        "objects": {"messages": [MESSAGES], "tools": [TOOLS]},
        "text": {"messages": [as_text], "tools": [json.dumps(TOOLS)]},
        "texts": {"messages": [as_text], "tools": [[json.dumps(tool) for tool in TOOLS]]},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")

    [expected] = ids_of(jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES, "tools": TOOLS}), tokens)
    assert [ids_of(str(tmp_path / f"{name}.parquet"), tokens) for name in tables] == [[expected]] * 3


def test_a_row_sets_the_templates_thinking_and_the_key_sets_it_for_others(tmp_path):
    template = QWEN.replace("<think>\\n\\n</think>\\n\\n", "{% if enable_thinking %}<think>{% endif %}").replace(
        '"<|im_start|>assistant\\n{% if enable_thinking %}<think>{% endif %}" + message.content',
        '"<|im_start|>assistant\\n" + ("<think>" if enable_thinking else "") + message.content',
    )
    tokens = ChatTokens(byte_tokenizer(template))
    messages = [MESSAGES[0], {"role": "assistant", "content": "7"}]
    file = jsonl(tmp_path / "rows.jsonl", *({"messages": messages, **own} for own in ({}, {"enable_thinking": True})))

    def answers(**keys: bool) -> list[str]:
        return [pieces(row, tokens)[-1][0] for row in ids_of(file, tokens, **keys)]

    assert answers() == ["7<|im_end|>", "<think>7<|im_end|>"]
    assert answers(enable_thinking_default=True) == ["<think>7<|im_end|>"] * 2


def test_long_rows_are_errors_by_place_or_cut_at_an_end(tmp_path, tokens):
    file = jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES[:1] + MESSAGES[3:]}, {"messages": MESSAGES})
    [short, long] = ids_of(file, tokens)

    with pytest.raises(TrackwayError) as refused:
        ids_of(file, tokens, max_length=len(short.ids))

    assert refused.value.message == (
        f"expected rows of at most data.max_length={len(short.ids)} tokens, got 1 of 2 with up to {len(long.ids)} "
        f"({file}:2); raise it, or set data.truncation=right or left"
    )
    [_, left] = ids_of(file, tokens, max_length=len(short.ids), truncation="left")
    [_, right] = ids_of(file, tokens, max_length=len(short.ids), truncation="right")
    assert (left.ids, right.ids) == (long.ids[-len(short.ids) :], long.ids[: len(short.ids)])
    with pytest.raises(
        TrackwayError, match=r"expected a trained token within data\.max_length=4 of each row, got none"
    ):
        ids_of(file, tokens, max_length=4, truncation="right")


def test_only_the_chosen_rows_are_taken(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", *({"messages": MESSAGES} for _ in range(4)))

    rows = load_conversations([file], RowChoice(2, of_kept=True), DataConfig())

    assert [row.place for row in rows] == [f"{file}:1", f"{file}:2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "expected the column messages (data.messages_key), got text; name the column"),
        ({"messages": "x"}, "messages: expected a list of messages, got str"),
        ({"messages": [{"role": "human", "content": "x"}]}, "role: Input should be 'system', 'user', 'assistant' or"),
        ({"messages": MESSAGES[:1]}, "messages: expected a message of the assistant behind another one, got the roles"),
        ({"messages": MESSAGES[1:]}, "behind another one, got the roles assistant, tool, assistant"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]},
            "message 0: expected the keys role, content, tool_calls, tool_call_id, name, got reasoning_content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, MESSAGES[3]]}, "content: Input should be a"),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "message 1: expected tool_calls with a function's name and arguments",
        ),
        ({"messages": MESSAGES, "tools": "{"}, "tools: Expecting property name"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools: 0.function: Field required"),
        ({"messages": MESSAGES, "enable_thinking": "yes"}, "enable_thinking: expected true or false, got 'yes'"),
        (
            {"messages": [*MESSAGES[:1], {"role": "system", "content": "x"}, MESSAGES[3]]},
            "messages: the model's chat template rejects them: a system message must come first",
        ),
    ],
)
def test_a_row_that_cannot_be_trained_says_where_and_why(tmp_path, tokens, row: object, reason: str):
    file = jsonl(tmp_path / "rows.jsonl", {"messages": MESSAGES, "tools": TOOLS}, row)

    with pytest.raises(TrackwayError) as refused:
        ids_of(file, tokens)

    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.message.startswith(f"{file}:2: ") and reason in refused.value.message


def test_a_missing_and_an_empty_file_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")

    with pytest.raises(TrackwayError, match=r"expected rows in .*empty\.jsonl, got none; write the file again"):
        load_conversations([str(tmp_path / "empty.jsonl")], ALL_ROWS, DataConfig())
    with pytest.raises(TrackwayError, match=r"expected a dataset file at .*other\.jsonl, got none"):
        load_conversations([str(tmp_path / "other.jsonl")], ALL_ROWS, DataConfig())
