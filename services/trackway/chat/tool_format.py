"""How a model writes tool calls: one format for agent loops, model APIs and sessions.

A format of one's own is a subclass with `parse`, decorated with `@register_tool_format("name")`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import JsonValue

from trackway.chat.tool_calls import ParsedCall
from trackway.wire.errors import ErrorCode, TrackwayError

Parameters = Mapping[str, JsonValue]
"""The JSON schema of each offered tool's parameters, by the tool's name."""
Format = TypeVar("Format", bound="type[ToolFormat]")


class Parsed(NamedTuple):
    """An assistant turn: the text outside its calls, and the calls in order."""

    content: str
    calls: list[ParsedCall]
    unclosed: ParsedCall | None = None
    """A last call that does not end, which is none of the calls. `raw` is its text."""


class ToolFormat(ABC):
    """The format of tool calls in the model's text, decoded with special tokens."""

    name: ClassVar[str]
    """The first name that it is registered under."""
    begins: ClassVar[tuple[str, ...]] = ()
    """Texts at which calls begin. Without one, a stream holds a message back until its end."""
    end: ClassVar[str] = ""
    """Text that ends a call. Without it, calls last until the end of the message."""
    at_start: ClassVar[bool] = False
    """True if calls begin only at the start of a message."""
    special: ClassVar[bool] = False
    """True if `begins` are special tokens, which streams decode only when asked."""

    @abstractmethod
    def parse(self, text: str, parameters: Parameters | None = None) -> Parsed:
        """The calls of a turn. A malformed call is kept with an error."""

    def opening(self, tool: str | None) -> str:
        """The start of a message that forces a call, of this tool if it is named."""
        raise self._lacks("tool_choice", "force a call", "send tool_choice=auto")

    def grammar(self, tool: str, schema: JsonValue) -> dict[str, JsonValue]:
        """A call of the tool as a `tag` of xgrammar's structural tags."""
        raise self._lacks("response_format", "guide calls", "send no response_format beside tools")

    def _lacks(self, param: str, what: str, remedy: str) -> TrackwayError:
        message = f"{param}: expected a tool format that can {what}, got {self.name} (tool_parser); {remedy}"
        return TrackwayError(ErrorCode.INVALID_REQUEST, message, param=param)


_FORMATS: dict[str, type[ToolFormat]] = {}


def register_tool_format(*names: str) -> Callable[[Format], Format]:
    """Class decorator: register a format under its names, for the setting `tool_parser`."""

    def add(tool_format: Format) -> Format:
        tool_format.name = names[0]
        _FORMATS.update(dict.fromkeys(names, tool_format))
        return tool_format

    return add


def registered() -> dict[str, type[ToolFormat]]:
    """Every format by its names, in the order of registration."""
    return {**_FORMATS}
