"""A replica's own port: uvicorn beside Ray Serve, in the same event loop and for the same app.

A call through Serve's proxy costs many times one that comes here. Serve starts, watches and stops the replica as ever;
it does not see these calls, so they are counted here, and a replica that stops ends them before it lets go.
"""

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

_BACKLOG = 2048
_POLL_S = 0.1


class DirectPort:
    """A free port of `host`, served while the app lives.

    living: how many things the app still keeps for its callers.
    drain_s: how long a replica that stops waits for them; until then it answers here.
    """

    def __init__(self, app: FastAPI, host: str, living: Callable[[], int], drain_s: float) -> None:
        self.url = ""
        """Where it answers; empty while it does not."""
        self.in_flight = 0
        """Requests in work that came in here."""
        self._host = host
        self._living = living
        self._drain_s = drain_s
        self._app: ASGIApp = app
        app.router.lifespan_context = self._around(app.router.lifespan_context)

    def _around(self, inner: Lifespan) -> Lifespan:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, object]]:
            async with inner(app) as state, self._served():
                yield state or {}

        return lifespan

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.create_server((self._host, 0), family=family, backlog=_BACKLOG)
        config = uvicorn.Config(
            self._count,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _spare_the_collector()
        try:
            yield
            await self._drain()
        finally:
            server.should_exit = True  # no new connections; those with a request end after it
            await serving
            self.url = ""

    async def _drain(self) -> None:
        end = time.monotonic() + self._drain_s
        while self._living() and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.in_flight -= 1


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are Ray's."""
        yield


def _spare_the_collector() -> None:
    """What lives now lives on: looking through it again and again takes a fifth of a small call's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
