"""Builds the response to one request, whole or as server-sent events, from the decoded choices."""

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import ClassVar

from trackway.model_api.message_reader import MessageReader
from trackway.model_api.sse import comment
from trackway.model_api.stream_decoder import NOTHING, Delta, joined
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.openai.response_requests import InputItem

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
