"""Reading tool calls from the model's text, which was decoded with special tokens kept.

A call that cannot be read is not dropped: it carries the text that tells the model so (verl logs and skips it, and the
model never learns why nothing came back).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from trackway.chat.tool_calls import BEGIN, END, ParsedCall, blocks_in, read_call, unclosed_call
from trackway.wire.errors import ErrorCode, TrackwayError


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
    """Class decorator: register a parser under `name`, for the setting `tool_parser`."""

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


@register_parser("hermes")
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write it."""

    def parse(self, text: str) -> Parsed:
        """Every call of the turn."""
        blocks, content, unclosed = blocks_in(text, BEGIN, END)
        calls = [read_call(block) for block in blocks]
        if unclosed is not None:
            calls.append(unclosed_call(unclosed))
        return Parsed(content.strip(), calls, unclosed is not None)
