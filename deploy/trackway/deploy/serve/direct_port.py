"""A replica's direct port: a uvicorn server for the same app, in the same event loop as Ray Serve.

A direct call costs a fraction of a call through Serve's proxy. Serve still starts, watches and stops the replica, but
does not see direct calls. They are counted here, and a stopping replica finishes them first. Each of its answers then
closes its connection, which tells the caller to go elsewhere. The port is closed when no connection is left, so no call
is on its way to it.

`trackway.deploy.probe` and `trackway.deploy.drain` ask a replica's Unix socket. A request through Ray Serve's proxy
reaches any replica of a service, and a direct port is a free one that expects a token. The socket has a known folder,
answers `/ready` and the requests in flight and nothing else, and only for processes that can open the file. The answer
comes from the event loop of the service's requests, so a blocked loop gives none.
"""

import asyncio
import contextlib
import errno
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from trackway.serving.limits import bounded_protocol
from trackway.serving.middleware import UNBROKEN, BatchLoad
from trackway.serving.settings import ConnectionSettings
from trackway.wire.service import Ready


def within_lifespan(app: FastAPI, served: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Enter `served()` at the end of the app's start, and leave it before the app stops."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, object]]:
        async with inner(app) as state, served():
            yield state or {}

    app.router.lifespan_context = lifespan


_BACKLOG = 2048
_POLL_S = 0.1
_STOP_S = 5.0
"""Seconds that a stopping replica's server may take after its drain."""
_KEEP_ALIVE_S = 30
"""Longest idle time of a connection; callers close theirs earlier, so that no request meets a closing connection."""


class DirectPort:
    """A port of `host`, served during the app's lifespan.

    port: the port, or 0 for a free one. The app starts once an earlier replica has left it.
    living: returns the number of resources that the app still holds for its callers.
    drain_s: longest time in seconds that a stopping replica takes calls while there are such resources or connections.
    connections: connection limits.
    batch_load: the app's work that its number of requests does not show.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str,
        living: Callable[[], int],
        drain_s: float,
        connections: ConnectionSettings | None = None,
        batch_load: BatchLoad | None = None,
        port: int = 0,
    ) -> None:
        self.url = ""
        """The address while the port is served, else empty."""
        self._host, self._port = host, port
        self._connections = connections or ConnectionSettings()
        self._living = living
        self._drain_s = drain_s
        self._app: ASGIApp = app
        self._state = app.state
        self._batch_load = batch_load or BatchLoad()
        self._requests: set[asyncio.Task[None]] = set()
        self._draining = False
        self._looks = self._seen = 0
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, object]]:
            with await self._listening() as listening:  # first, so that two replicas never work at once
                async with inner(app) as state, self._served(listening):
                    yield state or {}

        app.router.lifespan_context = lifespan

    @property
    def in_flight(self) -> int:
        """Requests at this port that are not answered yet, queued ones included. Entries of batches count singly."""
        return len(self._requests) + self._batch_load.extra

    def load(self) -> float:
        """Average requests in flight since the last call. A single sample would miss most short requests."""
        seen, looks = self._seen, self._looks
        self._seen = self._looks = 0
        return seen / looks if looks else float(self.in_flight)

    @asynccontextmanager
    async def _served(self, listening: socket.socket) -> AsyncIterator[None]:
        config = uvicorn.Config(
            self._unbroken,
            interface="asgi3",
            http=bounded_protocol(self._connections),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        server = _Server(config)
        self._requests = server.server_state.tasks
        serving, looking = asyncio.create_task(server.serve([listening])), asyncio.create_task(self._look())
        host, port = listening.getsockname()[:2]
        self.url = self._state.direct_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        freeze_garbage_collector()
        try:
            yield
            await self._drain(server.server_state)
        finally:
            looking.cancel()
            server.should_exit = True  # no new connections; open ones close after their request
            await serving
            self.url = self._state.direct_url = ""

    async def _listening(self) -> socket.socket:
        """Listen. Raises OSError when another process still has the port after the time of a stopping replica."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        end = time.monotonic() + self._drain_s + _STOP_S
        while True:
            try:
                return socket.create_server((self._host, self._port), family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _drain(self, state: ServerState) -> None:
        self._draining = True
        end = time.monotonic() + self._drain_s
        while (self._living() or state.connections) and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        while True:
            self._seen += self.in_flight
            self._looks += 1
            await asyncio.sleep(_POLL_S)

    async def _unbroken(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[UNBROKEN] = True  # uvicorn only reports that a client has disconnected

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, send_and_close)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Ray."""
        yield


def freeze_garbage_collector() -> None:
    """Exclude all current objects from garbage collection, which takes a fifth of a small call's time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


_ANSWER_S = 10.0


class ProbeSocket:
    """`FOLDER/SERVICE-REPLICA.sock` during the app's lifespan. Each connection gets the JSON of `/ready`,
    and `in_flight`, the number of requests in progress.

    The file is removed as soon as the replica stops, so a replica that drains no longer counts. The file of a killed
    replica refuses connections.
    """

    def __init__(
        self, app: FastAPI, folder: str, name: str, ready: Callable[[], Awaitable[Ready]], in_flight: Callable[[], int]
    ) -> None:
        self._folder = Path(folder)
        self._name = name
        self._ready, self._in_flight = ready, in_flight
        within_lifespan(app, self._served)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, hidden = self._folder / f"{self._name}.sock", self._folder / f".{self._name}"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(hidden))
            listening.listen()
            hidden.rename(path)  # a visible socket never refuses while its replica lives
            server = await asyncio.start_unix_server(self._answer, sock=listening)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                server.close()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                ready = await self._ready()
                writer.write(json.dumps({**ready.model_dump(), "in_flight": self._in_flight()}).encode())
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # the probe has given up
        finally:
            writer.close()
