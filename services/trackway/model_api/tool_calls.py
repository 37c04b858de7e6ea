"""Streamed tool calls in the format of Hermes, Qwen2.5 and Qwen3.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` becomes a call at its closing tag; a malformed call stays
text. White space around calls is dropped.
"""

from trackway.chat.tool_calls import BEGIN, END, read_call
from trackway.model_api.stop_strings import begun
from trackway.wire.chat import FunctionCall


class ToolCallReader:
    """Splits the text of a choice into plain text and calls."""

    def __init__(self, prefix: str, only_one: bool) -> None:
        """`prefix` precedes the first generated token, to force a tool call."""
        self._only_one = only_one
        self._behind_call = False
        self._in_call = False
        self._space = ""
        """White space before the open call."""
        self._searched: list[str] = []
        """Held text without the next tag: white space, or the text after the open call's BEGIN."""
        self._edge = prefix
        """Held text after `_searched`, to be searched again: a possible start of the next tag."""
        self.calls = 0

    def push(self, text: str) -> list[str | FunctionCall]:
        """The parts that are complete so far, in order. Takes linear time."""
        text = self._edge + text
        parts: list[str | FunctionCall] = []
        start = 0
        while (place := text.find(self._tag, start)) >= 0:
            self._searched.append(text[start:place])
            start = place + len(self._tag)
            if self._in_call:
                parts.extend(self._end_call())
            else:
                parts.append(self._take_plain())
                self._space, self._searched, self._in_call = "".join(self._searched), [], True
        kept = len(text) - begun(text[start:], [self._tag])
        self._searched.append(text[start:kept])
        self._edge = text[kept:]
        if not self._in_call:
            parts.append(self._take_plain())
        return [part for part in parts if part != ""]

    def rest(self) -> list[str | FunctionCall]:
        """The rest of the choice; an unclosed call becomes text."""
        opening = self._space + BEGIN if self._in_call else ""
        plain = self._plain("".join([opening, *self._searched, self._edge]))
        self._space, self._searched, self._edge, self._in_call = "", [], "", False
        return [plain] if plain else []

    @property
    def _tag(self) -> str:
        return END if self._in_call else BEGIN

    def _end_call(self) -> list[str | FunctionCall]:
        """The call whose END was just found, or its text."""
        block, space = "".join(self._searched), self._space
        self._space, self._searched, self._in_call = "", [], False
        call = read_call(block)
        if call.error is not None:
            return [self._plain(space + BEGIN + block + END)]
        return list(self._counted(FunctionCall(name=call.name, arguments=call.raw)))

    def _take_plain(self) -> str:
        """The searched text without the white space at its end, which stays held."""
        last = self._searched[-1].rstrip()
        if not last:
            return ""
        plain = "".join([*self._searched[:-1], last])
        self._searched = [self._searched[-1][len(last) :]]
        return self._plain(plain)

    def _plain(self, text: str) -> str:
        """The text without white space after a call; nothing once the only call is complete."""
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
