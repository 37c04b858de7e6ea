"""Streamed answers: one JSON document per line."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class NdjsonStream(StreamingResponse):
    """Sends each text of whole lines as it comes, and closes `texts` when the client has disconnected."""

    media_type = "application/x-ndjson"

    def __init__(self, texts: AsyncGenerator[str, None]) -> None:
        super().__init__(texts)
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette leaves an unfinished iterator to the garbage collector, too late to stop its work.
        async with aclosing(self._texts):
            await super().__call__(scope, receive, send)
