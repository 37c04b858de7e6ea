"""Parses tool calls from the model's text, decoded with special tokens.

A malformed call is kept with an error, which becomes its observation. (verl logs and drops it, so the model gets no
answer.)
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from trackway.chat.tool_calls import BEGIN, END, ParsedCall, blocks_in, read_call, unclosed_call
from trackway.wire.errors import ErrorCode, TrackwayError


class Parsed(NamedTuple):
    """The text outside the calls, and the calls in order."""

    content: str
    calls: list[ParsedCall]
    unclosed: bool = False
    """Whether the last call is incomplete."""


class ToolParser(Protocol):
    """Parses one assistant turn."""

    def parse(self, text: str) -> Parsed: ...


_PARSERS: dict[str, Callable[[], ToolParser]] = {}


def register_parser(name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
    """Class decorator: register a parser under `name`, for the setting `tool_parser`."""

    def add(parser: type[ToolParser]) -> type[ToolParser]:
        _PARSERS[name] = parser
        return parser

    return add


def tool_parser(name: str) -> ToolParser:
    """The parser registered under that name.

    Raises:
        TrackwayError: `invalid_request` when there is none.
    """
    if name not in _PARSERS:
        message = f"tool_parser: expected one of {sorted(_PARSERS)}, got {name!r}; add yours with @register_parser"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return _PARSERS[name]()


@register_parser("hermes")
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write it."""

    def parse(self, text: str) -> Parsed:
        """The calls of the turn."""
        blocks, content, unclosed = blocks_in(text, BEGIN, END)
        calls = [read_call(block) for block in blocks]
        if unclosed is not None:
            calls.append(unclosed_call(unclosed))
        return Parsed(content.strip(), calls, unclosed is not None)
