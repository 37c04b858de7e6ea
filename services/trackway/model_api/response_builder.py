"""Reads decoded choices, and builds from them the response to one request, whole or as server-sent events.

The first event is awaited before the response starts, so that an early error sets the status.
"""

import logging
import os
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from trackway.chat.tool_calls import ToolCallReader, ToolFormat
from trackway.model_api.prompts import forced_prefix
from trackway.model_api.stream_decoder import NOTHING, Delta, joined
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatRequest, ChoiceEnd
from trackway.wire.responses import InputItem

MEDIA_TYPE, HEADERS = "text/event-stream", MappingProxyType({"cache-control": "no-cache"})
_log = logging.getLogger(__name__)

Failed = Callable[[TrackwayError], str]
"""The last event of a stream that failed."""


class EventStream(StreamingResponse):
    """Sends events as they arrive; closes the source when the client disconnects."""

    def __init__(self, first: str, others: AsyncGenerator[str], failed: Failed) -> None:
        lines = _lines(first, others, failed)
        super().__init__(lines, media_type=MEDIA_TYPE, headers=HEADERS)
        self._source = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


def event(data: str, name: str | None = None) -> str:
    """One event, with its blank line."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def comment(text: str) -> str:
    """A comment, which every client skips."""
    return f": {text}\n\n"


async def _lines(first: str, others: AsyncGenerator[str], failed: Failed) -> AsyncGenerator[str]:
    yield first
    try:
        async for line in others:
            yield line
    except TrackwayError as error:
        yield failed(error)
    except Exception as error:
        _log.exception("a stream failed")
        message = f"{type(error).__name__}: {error}; this is a bug; see the traceback in the service's log"
        yield failed(TrackwayError(ErrorCode.INTERNAL, message))


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


Record = Callable[[list[Delta]], None]
"""Gets each choice as one delta: once all are complete and before the client can know it. When the client has left or
the generation failed, it gets what came until then, without a finish reason."""


class ResponseBuilder(ABC):
    """Builds one response, once."""

    prefix: ClassVar[str]
    """Prefix of the response's id."""

    def __init__(self, prompts: Sequence[list[int]], readers: Sequence[MessageReader]) -> None:
        """`readers` has one for each choice of each prompt."""
        self.prompts = prompts
        self._readers = readers
        self.id = f"{self.prefix}{os.urandom(16).hex()}"
        """The response's id, which is also the `request_id` of its generation."""

    @property
    def messages(self) -> list[Message]:
        """The message of each choice so far, as the client got it, with the ids of its tool calls."""
        return [reader.message for reader in self._readers]

    @property
    def items(self) -> Mapping[str, InputItem]:
        """The items of the response by their ids, as a client sends them back; of the Responses API alone."""
        return {}

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> str:
        """The complete response as JSON, from one delta per choice."""

    @abstractmethod
    def failed(self, error: TrackwayError) -> str:
        """The last event of a stream that failed."""

    @abstractmethod
    def _begin(self) -> Iterable[str]:
        """The events before the first delta's."""

    @abstractmethod
    def _events(self, index: int, delta: Delta) -> Iterable[str]:
        """The events of a delta."""

    @abstractmethod
    def _end(self) -> Iterable[str]:
        """The events after the last delta's."""

    def _alive(self) -> str:
        """The event that keeps a connection open."""
        return comment("keep-alive")

    async def events(
        self, arriving: AsyncGenerator[tuple[int, Delta] | None], record: Record | None = None
    ) -> AsyncGenerator[str]:
        """The response as events, each with its blank line. The first comes with the first delta.

        None instead of a delta makes an event that keeps the connection open.
        """
        deltas: list[list[Delta]] = [[] for _ in self._readers]
        running, begun = len(self._readers), False
        try:
            async with aclosing(arriving):
                async for item in arriving:
                    if item is None:
                        yield self._alive() if begun else comment("keep-alive")
                        continue
                    index, delta = item
                    new = [*([] if begun else self._begin()), *self._events(index, delta)]
                    begun = True
                    deltas[index].append(delta)
                    running -= delta.finish_reason is not None
                    if not running and record is not None:
                        record([joined(parts) for parts in deltas])
                    for event in new:
                        yield event
        finally:
            if running and record is not None:
                record([replace(joined([NOTHING, *parts]), finish_reason=None) for parts in deltas])
        for event in self._end():
            yield event
