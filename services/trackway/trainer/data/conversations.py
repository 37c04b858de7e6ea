"""Rows of supervised training: conversations in OpenAI's chat format, encoded as rollouts are.

    prompt       template(messages before the assistant's first, tools)   mask 0
    assistant    what the model writes, with the token that ends its turn mask 1
    tool, user   what the template puts between two turns                 mask 0

A rollout in which the model writes the assistant's messages has the same ids (trackway.chat.tokens). Messages after the
assistant's last one are left out, because nothing trains on them.
"""

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from trackway.chat.tokens import ChatTokens
from trackway.run_config import RunConfig
from trackway.run_config.models import DataConfig
from trackway.trainer.data.dataset import RowChoice
from trackway.trainer.data.row_files import Record, counted, read_each
from trackway.trainer.data.rows import prune
from trackway.wire.chat import Message, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

T = TypeVar("T")

_NO_LIMIT = 2**31
_SHOWN = 5
"""Most rows named in a message. The others are counted."""
_TOOLS = TypeAdapter(list[ToolSchema])
_SHAPE = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


class SupervisedRow(NamedTuple):
    """A row of a file."""

    place: str
    """Its file and line."""
    messages: list[Message]
    """At least one before the first of the assistant."""
    tools: list[ToolSchema]
    thinking: bool | None
    """The chat template's variable `enable_thinking`. None leaves it to the template."""


class EncodedRow(NamedTuple):
    """The token ids of a conversation."""

    ids: Sequence[int]
    mask: Sequence[int]
    """1 for tokens that are trained, of the same length."""


def load_conversations(files: Sequence[str], choice: RowChoice, data: DataConfig) -> list[SupervisedRow]:
    """The chosen rows of all files. Raises TrackwayError for a missing, empty or invalid file."""
    rows = [row for file in files for row in read_each(Path(file), lambda record: _conversation(record, data))]
    return [rows[position] for position in choice.positions(len(rows))]


def rows_to_train(config: RunConfig, most: int, files: Sequence[str], tokens: ChatTokens) -> list[EncodedRow]:
    """The rows of these files, at most `most` of them, encoded. Raises TrackwayError as `load_conversations` does."""
    return encoded(load_conversations(files, RowChoice.of(config, most), config.data), tokens, config.data)


def encoded(rows: Sequence[SupervisedRow], tokens: ChatTokens, data: DataConfig) -> list[EncodedRow]:
    """The ids of each conversation, within `data.max_length`. Needs seconds for a thousand long rows.

    Raises TrackwayError(INVALID_REQUEST) for messages that the chat template rejects, overlong rows with
    `data.truncation=error`, and rows of which no trained token is left.
    """

    @lru_cache
    def with_thinking(thinking: bool | None) -> ChatTokens:
        if thinking is None:
            return tokens
        return ChatTokens(tokens.tokenizer, {**tokens.template_kwargs, "enable_thinking": thinking})

    async def encode_all() -> list[EncodedRow]:
        found = counted(rows, "conversations encoded", len(rows))
        return [await _encoded(row, with_thinking(row.thinking)) for row in found]

    whole = asyncio.run(encode_all())
    overlong = [place for place, row in enumerate(whole) if len(row.ids) > data.max_length]
    if overlong and data.truncation == "error":
        longest = max(len(whole[place].ids) for place in overlong)
        got = f"{len(overlong)} of {len(rows)} with up to {longest} ({_named(rows, overlong)})"
        raise _refused(
            f"expected rows of at most data.max_length={data.max_length} tokens, got {got}; raise it, or set "
            "data.truncation=right or left"
        )
    part = slice(-data.max_length, None) if data.truncation == "left" else slice(data.max_length)
    cut = [EncodedRow(row.ids[part], row.mask[part]) for row in whole]
    empty = [place for place, row in enumerate(cut) if not any(row.mask[1:])]
    if empty:
        raise _refused(
            f"expected a trained token within data.max_length={data.max_length} of each row, got none in "
            f"{_named(rows, empty)}; raise it, or remove the rows"
        )
    return cut


async def _encoded(row: SupervisedRow, tokens: ChatTokens) -> EncodedRow:
    messages = row.messages
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    try:
        ids = await tokens.prompt(messages[: turns[0]], row.tools, _NO_LIMIT)
        mask = [0] * len(ids)
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            written = await tokens.written(messages[turn])
            behind = [] if after is None else await tokens.observation(messages[turn + 1 : after], written)
            ids += [*written, *behind]
            mask += [*[1] * len(written), *[0] * len(behind)]
    except TrackwayError as error:
        raise TrackwayError(error.code, f"{row.place}: {error.message}", **error.detail) from error
    return EncodedRow(array("i", ids), array("b", mask))


def _conversation(record: Record, data: DataConfig) -> SupervisedRow:
    place, row = f"{record.file}:{record.line}", prune(record.data)
    messages = row.get(data.messages_key)
    if messages is None:
        raise _refused(
            f"{place}: expected the column {data.messages_key} (data.messages_key), got {', '.join(row)}; name the "
            "column of the conversation"
        )
    thinking = row.get(data.enable_thinking_key, data.enable_thinking_default)
    if not isinstance(thinking, bool | None):
        raise _refused(f"{place}: {data.enable_thinking_key}: expected true or false, got {thinking!r}; correct it")
    read = _parsed(f"{place}: {data.messages_key}", lambda: _messages(messages))
    roles = [message.role for message in read]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise _refused(
            f"{place}: {data.messages_key}: expected a message of the assistant behind another one, got the roles "
            f"{', '.join(roles) or 'of no message'}; {_SHAPE}"
        )
    tools = _parsed(f"{place}: {data.tools_key}", lambda: _TOOLS.validate_python(_tools(row.get(data.tools_key))))
    return SupervisedRow(place, read, tools, thinking)


def _messages(value: JsonValue) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of messages, got {type(value).__name__}; {_SHAPE}")
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, value: JsonValue) -> Message:
    """A message. Arguments of tool calls may be objects or text, and ids may be missing, as in published data."""
    if not isinstance(value, dict):
        raise ValueError(f"message {number}: expected an object, got {type(value).__name__}; {_SHAPE}")
    others = sorted(value.keys() - Message.model_fields.keys())
    if others:
        known = ", ".join(Message.model_fields)
        raise ValueError(f"message {number}: expected the keys {known}, got {', '.join(others)}; remove them")
    calls = value.get("tool_calls")
    if isinstance(calls, list):
        value = {**value, "tool_calls": [_call(number, place, call) for place, call in enumerate(calls)] or None}
    return Message.model_validate({"content": "", **value})


def _call(turn: int, place: int, call: JsonValue) -> dict[str, JsonValue]:
    given: Mapping[str, JsonValue] = call if isinstance(call, dict) else {}
    function = given.get("function", given)
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"message {turn}: expected tool_calls with a function's name and arguments, got {call!r}")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": given.get("id", f"call{turn:03}{place:02}"),
        "function": {"name": function["name"], "arguments": text},
    }


def _tools(value: JsonValue) -> JsonValue:
    """The tools of a column, which may be JSON text, as a whole or each, since parquet has no free keys."""
    shown = json.loads(value) if isinstance(value, str) else value or []
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in shown] if isinstance(shown, list) else shown


def _parsed(what: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise _refused(f"{what}: {where}: {problem['msg']}, got {problem['input']!r:.100}; correct it") from error
    except ValueError as error:
        raise _refused(f"{what}: {error}") from error


def _named(rows: Sequence[SupervisedRow], places: Sequence[int]) -> str:
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return ", ".join(rows[place].place for place in places[:_SHOWN]) + more


def _refused(message: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)
