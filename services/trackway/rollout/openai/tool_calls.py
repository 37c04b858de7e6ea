"""Tool calls in the model's text, as Hermes, Qwen2.5 and Qwen3 write them, read while the text comes.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` becomes a call, at its end; one that cannot be read stays
text. White space around calls belongs to them.
"""

from trackway.chat.tool_calls import BEGIN, END, read_call
from trackway.rollout.openai.stop_strings import begun
from trackway.wire.chat import FunctionCall


class ToolCallReader:
    """Splits the text of one choice into plain text and calls."""

    def __init__(self, prefix: str, only_one: bool) -> None:
        """`prefix` stands before the model's first token, put there so that it must call a tool."""
        self._held = prefix
        self._only_one = only_one
        self._behind_call = False
        self.calls = 0

    def push(self, text: str) -> list[str | FunctionCall]:
        """What is certain now, in order."""
        self._held += text
        parts: list[str | FunctionCall] = []
        while True:
            before, begin, after = self._held.partition(BEGIN)
            block, end, rest = after.partition(END)
            if not (begin and end):
                break
            call = read_call(block)
            if call.error is not None:
                parts.append(self._plain(before + BEGIN + block + END))
            else:
                parts.append(self._plain(before.rstrip()))
                parts.extend(self._counted(FunctionCall(name=call.name, arguments=call.raw)))
            self._held = rest
        plain = before.rstrip() if begin else before[: len(before) - begun(before, [BEGIN])].rstrip()
        parts.append(self._plain(plain))
        self._held = self._held[len(plain) :]
        return [part for part in parts if part != ""]

    def rest(self) -> list[str | FunctionCall]:
        """The end of the choice: a call that was begun and not ended is text."""
        plain, self._held = self._plain(self._held), ""
        return [plain] if plain else []

    def _plain(self, text: str) -> str:
        """Text without the white space behind a call, or nothing once the only call is made."""
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
