"""Tool calls in the model's text: their JSON, the format in which a model writes them, and reading them from a stream.

Your own format is a subclass of `ToolFormat` with `parse`, decorated with `@register_tool_format("name")`.

A malformed call carries the reason. In a stream a call becomes one at its end, and a malformed or unclosed one stays
text. White space around calls is dropped.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import JsonValue
from pydantic_core import from_json

from trackway.wire.chat import FunctionCall
from trackway.wire.errors import ErrorCode, TrackwayError

BEGIN, END = "<tool_call>", "</tool_call>"
_WANTED = '{"name": "<function>", "arguments": {...}}'
_CUT = re.compile(r"[\w.+\\-]*\s*")
"""Text between the place of a JSON error and the end of a text that was cut there."""
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,256})"')


@dataclass(frozen=True)
class ParsedCall:
    """A call as the model wrote it. A call with `error` cannot run, and `error` is its observation."""

    name: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)
    raw: str = ""
    """The arguments as JSON, or the text of a malformed call."""
    error: str | None = None


class JsonPrefix(NamedTuple):
    """The JSON value with which a text begins, and the text behind it."""

    value: JsonValue
    behind: str
    error: str = ""
    """Why it is no JSON."""
    is_cut: bool = False
    """True if the text ended within it."""


def json_prefix(text: str) -> JsonPrefix:
    """Read the value at the start of a text."""
    try:
        value, end = _DECODER.raw_decode(text)
        return JsonPrefix(_strict(value), text[end:])
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or _CUT.fullmatch(text, error.pos) is not None
        return JsonPrefix(None, "", str(error), is_cut)
    except (ValueError, RecursionError) as error:
        return JsonPrefix(None, "", str(error))


def blocks_in(text: str, begin: str, end: str) -> tuple[list[str], str, str | None]:
    """The text between each `begin` and the next `end`, the text outside, and the text after an unclosed `begin`.

    A regular expression would scan for `end` from every unclosed `begin`.
    """
    blocks: list[str] = []
    outside: list[str] = []
    start = 0
    while (opened := text.find(begin, start)) >= 0:
        closed = text.find(end, opened + len(begin))
        if closed < 0:
            break
        outside.append(text[start:opened])
        blocks.append(text[opened + len(begin) : closed])
        start = closed + len(end)
    rest, is_open, behind = text[start:].partition(begin)
    return blocks, "".join([*outside, rest]), behind if is_open else None


def read_call(block: str) -> ParsedCall:
    """Parse the call between the tags."""
    try:
        call = read_json(block)
    except (ValueError, RecursionError) as error:
        return malformed_json(block, str(error), f"{_WANTED} in {BEGIN}...{END}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str):
        return malformed(block, f"{_WANTED} in {BEGIN}...{END}")
    return with_arguments(name, call.get("arguments", {}), block)


def unclosed_call(text: str) -> ParsedCall:
    """The error for a call without a closing tag."""
    error = f"Invalid tool call: expected {END} after {BEGIN}, got the end of the turn."
    return ParsedCall(name=_name_in(text), raw=text, error=error)


def with_arguments(name: str, arguments: JsonValue, block: str) -> ParsedCall:
    """The call with these arguments, which may be JSON in a string."""
    try:
        read = read_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return malformed_arguments(name, block, str(error))
    if not isinstance(read, dict):
        return malformed_arguments(name, block, f"expected an object, got {type(read).__name__}")
    return ParsedCall(name, read, _ENCODER.encode(read))


def malformed_arguments(name: str, block: str, reason: str) -> ParsedCall:
    """The error for a call whose function is known."""
    return ParsedCall(name=name, raw=block, error=f"Invalid JSON in arguments for '{name}': {reason}")


def malformed(block: str, wanted: str = _WANTED) -> ParsedCall:
    """The error for a call without a function."""
    return ParsedCall(name="", raw=block, error=f"Invalid tool call: expected {wanted}, got {block.strip()!r}")


def malformed_json(block: str, reason: str, wanted: str = _WANTED) -> ParsedCall:
    """The error for a call that is no JSON."""
    name = _name_in(block)
    return malformed_arguments(name, block, reason) if name else malformed(block, wanted)


def _name_in(block: str) -> str:
    match = _NAME.search(block)
    return match.group(1) if match else ""


def read_json(text: str) -> JsonValue:
    """Strict JSON that a service accepts: rejects NaN, infinite numbers, lone surrogates, and nesting above 201.

    Raises ValueError, RecursionError.
    """
    return _strict(_DECODER.decode(text))


def _strict(value: JsonValue) -> JsonValue:
    from_json(_ENCODER.encode(value).encode(), allow_inf_nan=False)
    return value


def _no_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


_DECODER, _ENCODER = json.JSONDecoder(parse_constant=_no_constant), json.JSONEncoder(ensure_ascii=False)


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


def begun(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may start a marker."""
    longest = 0
    for mark in marks:
        place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while place >= 0 and not mark.startswith(text[place:]):
            place = text.find(mark[0], place + 1)
        if place >= 0:
            longest = max(longest, len(text) - place)
    return longest


class ToolCallReader:
    """Reads one message."""

    def __init__(
        self, tool_format: ToolFormat, prefix: str = "", only_one: bool = False, parameters: Parameters | None = None
    ) -> None:
        """`prefix` precedes the first generated token, to force a tool call."""
        self._format, self._parameters = tool_format, parameters
        self._only_one = only_one
        self._behind_call = False
        self._in_call = not tool_format.begins
        self._begin = ""
        """Beginning of the open call."""
        self._no_more = False
        """True if no call can begin any more."""
        self._space = ""
        """White space before the open call."""
        self._searched: list[str] = []
        """Held text without the next mark: white space, or the text of the open call behind its beginning."""
        self._edge = prefix
        """Held text after `_searched`, to be searched again: a possible start of the next mark."""
        self.calls = 0

    def push(self, text: str) -> list[str | FunctionCall]:
        """The parts that are complete so far, in order. Takes linear time."""
        text = self._edge + text
        parts: list[str | FunctionCall] = []
        start = 0
        while (found := self._next_mark(text, start)) is not None:
            place, mark = found
            self._searched.append(text[start:place])
            start = place + len(mark)
            if self._in_call:
                parts.extend(self._end_call(mark))
            else:
                parts.append(self._take_plain())
                self._space, self._searched, self._in_call, self._begin = "".join(self._searched), [], True, mark
        kept = len(text) - begun(text[start:], self._marks)
        self._searched.append(text[start:kept])
        self._edge = text[kept:]
        if not self._in_call:
            parts.append(self._take_plain())
        return [part for part in parts if part != ""]

    def rest(self) -> list[str | FunctionCall]:
        """The rest of the choice. An unclosed call becomes text."""
        parts: list[str | FunctionCall] = []
        self._searched.append(self._edge)
        if self._in_call:
            parts = self._end_call("") if not self._format.end else [self._plain(self._held(""))]
        else:
            parts = [self._plain("".join(self._searched))]
        self._space, self._searched, self._edge, self._in_call = "", [], "", False
        return [part for part in parts if part != ""]

    @property
    def _marks(self) -> tuple[str, ...]:
        """The texts that end the open call, or begin the next one."""
        if self._in_call:
            return (self._format.end,) if self._format.end else ()
        return () if self._no_more else self._format.begins

    def _next_mark(self, text: str, start: int) -> tuple[int, str] | None:
        marks = self._marks
        if self._format.at_start and not self._in_call and not self._no_more:
            message = text.lstrip()
            if message and not any(mark.startswith(message) or message.startswith(mark) for mark in marks):
                self._no_more = True
                return None
        places = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
        return min(places, default=None)

    def _held(self, end: str) -> str:
        return "".join([self._space, self._begin, *self._searched, end])

    def _end_call(self, end: str) -> list[str | FunctionCall]:
        """The calls of the block that ends here, or its text."""
        text = self._held(end)
        self._space, self._searched, self._in_call = "", [], False
        parsed = self._format.parse(text.strip(), self._parameters)
        if not parsed.calls or parsed.unclosed is not None or any(call.error is not None for call in parsed.calls):
            return [self._plain(text)]
        parts: list[str | FunctionCall] = [self._plain(parsed.content)]
        for call in parsed.calls:
            parts += self._counted(FunctionCall(name=call.name, arguments=call.raw))
        return parts

    def _take_plain(self) -> str:
        """The searched text without the white space at its end, which stays held."""
        last = self._searched[-1].rstrip()
        if not last:
            return ""
        plain = "".join([*self._searched[:-1], last])
        self._searched = [self._searched[-1][len(last) :]]
        return self._plain(plain)

    def _plain(self, text: str) -> str:
        """The text without white space after a call. Nothing once the only call is complete."""
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        return "" if self._only_one and self.calls else text

    def _counted(self, call: FunctionCall) -> list[FunctionCall]:
        if self._only_one and self.calls:
            return []
        self.calls += 1
        self._behind_call = True
        return [call]
