"""Reads the message of a choice out of its text: content and tool calls."""

import secrets
import string
from typing import NamedTuple

from trackway.chat.call_reader import ToolCallReader
from trackway.chat.tool_format import ToolFormat
from trackway.model_api.prompts import forced_prefix
from trackway.model_api.stream_decoder import Delta
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.openai.replies import ChoiceEnd
from trackway.wire.openai.requests import ChatRequest

_ALPHABET = string.ascii_letters + string.digits


class MessageParts(NamedTuple):
    """The next part of a message."""

    in_order: list[str | ToolCall]
    finish_reason: ChoiceEnd | None

    @property
    def content(self) -> str:
        """The new text."""
        return "".join(part for part in self.in_order if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        """The new calls."""
        return [part for part in self.in_order if isinstance(part, ToolCall)]


class MessageReader:
    """The state of one choice."""

    def __init__(self, request: ChatRequest | None = None, tool_format: ToolFormat | None = None) -> None:
        """Without a request, or without tools in it, all text is content."""
        self._reader: ToolCallReader | None = None
        if request is not None and tool_format is not None and request.offers_tools:
            parameters = {tool.name: tool.function.get("parameters") for tool in request.tools}
            prefix = forced_prefix(request, tool_format)
            self._reader = ToolCallReader(tool_format, prefix, not request.parallel_tool_calls, parameters)
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def message(self) -> Message:
        """The message so far."""
        return Message(role="assistant", content="".join(self._content), tool_calls=self._calls or None)

    def read(self, delta: Delta) -> MessageParts:
        """The parts that the delta completes."""
        parts: list[str | FunctionCall] = [delta.text] if delta.text else []
        if self._reader is not None:
            parts = self._reader.push(delta.text) + (self._reader.rest() if delta.finish_reason else [])
        in_order = [part if isinstance(part, str) else _identified(part) for part in parts]
        self._content += [part for part in in_order if isinstance(part, str)]
        self._calls += [part for part in in_order if isinstance(part, ToolCall)]
        reason = "tool_calls" if self._calls and delta.finish_reason == "stop" else delta.finish_reason
        return MessageParts(in_order, reason)


def _identified(call: FunctionCall) -> ToolCall:
    # Nine letters and digits, which Mistral's chat templates require.
    named = "".join(secrets.choice(_ALPHABET) for _ in range(9))
    return ToolCall(id=named, type="function", function=call)
