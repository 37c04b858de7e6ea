"""An answered call of a session, and its response, which knows whether the client got it."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from fastapi import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from trackway.agent.sessions.graph import Conversation
from trackway.model_api.stream_decoder import Delta
from trackway.wire.sessions.graph import GraphNode


class Recorded(NamedTuple):
    """An answered call."""

    number: int
    deltas: list[Delta]
    nodes: list[GraphNode]
    conversation: Conversation | None
    """None for a text completion."""


class DeliveredResponse(Response):
    """Sends a response, and marks its nodes as delivered when the client was sent the end."""

    def __init__(
        self,
        response: Response,
        answer: "asyncio.Future[Recorded | None]",
        left: Callable[[], None],
        before_send: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._response, self._answer, self._left, self._before_send = response, answer, left, before_send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: AsgiMessage) -> None:
            if message["type"] == "http.response.body":
                self._before_send()
                if not message.get("more_body", False):
                    self._deliver()
            await send(message)

        try:
            await self._response(scope, receive, watched)
        finally:
            self._left()

    def _deliver(self) -> None:
        recorded = self._answer.result() if self._answer.done() else None
        for node in recorded.nodes if recorded is not None else []:
            node.delivered = True
