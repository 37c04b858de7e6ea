"""Reading tool calls from the model's text, which was decoded with special tokens kept.

A call that cannot be read is not dropped: it carries the text that tells the model so (verl logs and skips it, and the
model never learns why nothing came back).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from trackway.wire.errors import ErrorCode, TrackwayError


@dataclass(frozen=True)
class ParsedCall:
    """One call as the model wrote it; with `error` set it cannot run, and `error` is what the model is told."""

    name: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)
    raw: str = ""
    """The arguments as JSON, or the whole unreadable text of the call."""
    error: str | None = None


class Parsed(NamedTuple):
    """The text outside the calls, and the calls in the order of the text."""

    content: str
    calls: list[ParsedCall]
    unclosed: bool = False
    """The last call was begun and not ended."""


class ToolParser(Protocol):
    """Reads one assistant turn."""

    def parse(self, text: str) -> Parsed: ...


_PARSERS: dict[str, Callable[[], ToolParser]] = {}


def register_parser(name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
    """Class decorator: make a parser known under `name`, to be chosen by the setting `tool_parser`."""

    def add(parser: type[ToolParser]) -> type[ToolParser]:
        _PARSERS[name] = parser
        return parser

    return add


def tool_parser(name: str) -> ToolParser:
    """The parser of that name.

    Raises:
        TrackwayError: `invalid_request` when there is none.
    """
    if name not in _PARSERS:
        message = f"tool_parser: expected one of {sorted(_PARSERS)}, got {name!r}; add yours with @register_parser"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return _PARSERS[name]()


_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_BEGIN}(.*?){_END}", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,256})"')


@register_parser("hermes")
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write it."""

    def parse(self, text: str) -> Parsed:
        """Every call of the turn."""
        calls = [_read(block) for block in _CALL.findall(text)]
        content, begun, rest = _CALL.sub("", text).partition(_BEGIN)
        if begun:
            calls.append(_unclosed(rest))
        return Parsed(content.strip(), calls, bool(begun))


def _unclosed(text: str) -> ParsedCall:
    error = f"Invalid tool call: expected {_END} after {_BEGIN}, got the end of the turn."
    return ParsedCall(name=_name_in(text), raw=text, error=error)


def _read(block: str) -> ParsedCall:
    try:
        call = _json(block)
    except (ValueError, RecursionError) as error:
        return _malformed(_name_in(block), block, str(error))
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str):
        return _malformed("", block, "no name")
    return _with_arguments(name, call.get("arguments", {}), block)


def _with_arguments(name: str, arguments: JsonValue, block: str) -> ParsedCall:
    try:
        read = _json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return _malformed(name, block, str(error))
    if not isinstance(read, dict):
        return _malformed(name, block, f"expected an object, got {type(read).__name__}")
    return ParsedCall(name, read, json.dumps(read, ensure_ascii=False))


def _malformed(name: str, block: str, reason: str) -> ParsedCall:
    if name:
        error = f"Invalid JSON in arguments for '{name}': {reason}"
    else:
        wanted = '{"name": "<function>", "arguments": {...}}'
        error = f"Invalid tool call: expected {wanted} in {_BEGIN}...{_END}, got {block.strip()!r}"
    return ParsedCall(name=name, raw=block, error=error)


def _name_in(block: str) -> str:
    found = _NAME.search(block)
    return found.group(1) if found else ""


def _json(text: str) -> JsonValue:
    """Strict JSON: no NaN, no lone surrogates, since both cannot be sent on as JSON."""
    value: JsonValue = json.loads(text, parse_constant=_no_constant)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")
