"""Splits the streamed text of a message into plain text and tool calls.

A call becomes one at its end. A malformed or unclosed one stays text. White space around calls is dropped.
"""

from collections.abc import Sequence

from trackway.chat.tool_format import Parameters, ToolFormat
from trackway.wire.chat import FunctionCall


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
