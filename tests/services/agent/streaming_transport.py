"""An app in this process whose answers arrive as it sends them, and which learns that a client has left."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.types import ASGIApp, Message


def scope_of(request: httpx.Request) -> dict[str, Any]:
    """The request as ASGI has it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 123),
        "root_path": "",
    }


class StreamingTransport(httpx.AsyncBaseTransport):
    """Like httpx.ASGITransport, which gives an answer once it is complete."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        received: asyncio.Queue[Message] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": await request.aread(), "more_body": False})
        running = asyncio.create_task(self._app(scope_of(request), received.get, sent.put))  # pyright: ignore[reportArgumentType]
        running.add_done_callback(lambda _: sent.put_nowait(None))
        start = await sent.get()
        if start is None:
            await running
            raise httpx.RemoteProtocolError("the app sent no answer")
        return httpx.Response(start["status"], headers=start["headers"], stream=_Body(sent, received, running))


class _Body(httpx.AsyncByteStream):
    def __init__(
        self, sent: "asyncio.Queue[Message | None]", received: "asyncio.Queue[Message]", running: "asyncio.Task[None]"
    ) -> None:
        self._sent, self._received, self._running = sent, received, running

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._sent.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return

    async def aclose(self) -> None:
        """The client leaves, or has all."""
        self._received.put_nowait({"type": "http.disconnect"})
        await asyncio.wait({self._running}, timeout=5)
