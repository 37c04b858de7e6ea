"""A replica's Unix socket, which `trackway.deploy.probe` and `trackway.deploy.drain` ask.

A request through Ray Serve's proxy reaches any replica of a service, and a replica's direct port is a free one that
expects a token. This socket has a known folder, answers `/ready` and the requests in flight and nothing else, and only
for processes that can open the file. The answer comes from the event loop of the service's requests, so a blocked loop
gives none.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from trackway.deploy.serve.direct_port import within_lifespan
from trackway.wire.health import Ready

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
