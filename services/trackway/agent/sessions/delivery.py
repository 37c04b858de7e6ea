"""An answered call of a session, and its response, which knows whether the client got it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import Request, Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from trackway.agent.sessions.graph import Conversation
from trackway.model_api.response_builder import HEADERS, MEDIA_TYPE, Failed, comment
from trackway.model_api.stream_decoder import Delta
from trackway.wire.errors import TrackwayError
from trackway.wire.sessions import GraphNode


class Recorded(NamedTuple):
    """An answered call."""

    number: int
    deltas: list[Delta]
    nodes: list[GraphNode]
    conversation: Conversation | None
    """None for a text completion."""


@dataclass(eq=False)
class CallAnswer:
    """The answer to a call, which retries of the call get too."""

    recorded: "asyncio.Future[Recorded | None]"
    """None when the client left before the end."""
    clients: int = 1
    """Connected clients that wait for it."""
    retries: int = 0

    @property
    def complete(self) -> Recorded:
        """The record. Raises ValueError before it is complete."""
        recorded = self.recorded.result() if self.recorded.done() else None
        if recorded is None:
            raise ValueError("expected an answered call, got one without its record")
        return recorded

    @property
    def is_lost(self) -> bool:
        """Return whether it is complete, and the connection broke before its client was sent the end."""
        recorded = self.recorded.result() if self.recorded.done() and not self.clients else None
        return recorded is not None and not all(node.delivered for node in recorded.nodes)


class DeliveredResponse(Response):
    """Sends a response, and marks its nodes as delivered when a connected client was sent the end."""

    def __init__(
        self,
        response: Response,
        answer: CallAnswer,
        left: Callable[[], None],
        before_send: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._response, self._answer, self._left, self._before_send = response, answer, left, before_send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: AsgiMessage) -> None:
            if message["type"] == "http.response.body":
                self._before_send()
                if not message.get("more_body", False) and not await Request(scope, receive).is_disconnected():
                    self._deliver()
            await send(message)

        try:
            await self._response(scope, receive, watched)
        finally:
            self._left()

    def _deliver(self) -> None:
        recorded = self._answer.recorded.result() if self._answer.recorded.done() else None
        for node in recorded.nodes if recorded is not None else []:
            node.delivered = True


class WaitingStream(Response):
    """The stream of a call that waits for another one in progress: comments until then, and after that its events.

    `proceed` waits for a while. It returns the response, or another WaitingStream when there is none yet.
    """

    def __init__(self, proceed: Callable[[], Awaitable[Response]], failed: Failed) -> None:
        super().__init__(headers=HEADERS, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self.proceed, self._failed = proceed, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_start(message: AsgiMessage) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        def body(text: str, *, more: bool) -> AsgiMessage:
            return {"type": "http.response.body", "body": text.encode(), "more_body": more}

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        response: Response = self
        try:
            while isinstance(response, WaitingStream):
                await send(body(comment("keep-alive"), more=True))
                response = await response.proceed()
        except TrackwayError as error:
            await send(body(self._failed(error), more=False))
            return
        await response(scope, receive, without_start)
