"""Serve an app with uvicorn, or a server of the standard library, in the tests' process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import HTTPServer
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tests.waiting import async_until, until

STOPS_WITHIN_S = 30.0
DEFAULTS = {"log_level": "warning", "ws": "none", "timeout_graceful_shutdown": 5}


def server_of(app: ASGIApp, port: int = 0, **config: Any) -> uvicorn.Server:
    """A server that leaves the process's signals alone; `config` goes to uvicorn."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, **{**DEFAULTS, **config}))
    server.capture_signals = suppress  # type: ignore[method-assign]
    return server


def url_of(server: uvicorn.Server) -> str:
    """The URL on this machine of a server that has started."""
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


@asynccontextmanager
async def served(app: ASGIApp, port: int = 0, **config: Any) -> AsyncIterator[str]:
    """Yield the app's URL; it runs in this event loop."""
    server = server_of(app, port, **config)
    task = asyncio.create_task(server.serve())
    try:
        await async_until(lambda: server.started or task.done())
        yield url_of(server)
    finally:
        server.should_exit = True
        async with asyncio.timeout(STOPS_WITHIN_S):
            await task


@contextmanager
def served_in_thread(app: ASGIApp, port: int = 0, **config: Any) -> Iterator[str]:
    """Yield the app's URL; it runs in a thread of its own."""
    server = server_of(app, port, **config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        yield url_of(server)
    finally:
        server.should_exit = True
        thread.join(STOPS_WITHIN_S)
        assert not thread.is_alive(), f"the server did not stop within {STOPS_WITHIN_S:.0f} s"


@contextmanager
def answered_by(server: HTTPServer) -> Iterator[str]:
    """Yield the URL of a server, which answers in a thread of its own."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(STOPS_WITHIN_S)
