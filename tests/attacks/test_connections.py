"""Clients that connect and do not go on: slow headers, slow bodies, too many connections, no files left."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp
from uvicorn.config import HTTP_PROTOCOLS

from tests.attacks.service_process import service_process
from tests.serving import port_of, served
from tests.time_limits import slowness
from tests.waiting import async_until
from trackway.deploy.http_proxy import bound_connections
from trackway.deploy.serve.direct_port import DirectPort
from trackway.serving import ServiceSettings, service_app
from trackway.serving.limits import MAX_HEADER_BYTES
from trackway.serving.settings import ConnectionSettings

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

PARTIAL = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "
WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
ENDS_WITHIN_S = 30.0
"""Far above every limit that the tests set, so that only a connection without a limit lasts as long."""


class Gate:
    """A service whose one route waits until it is opened."""

    def __init__(self, **settings: object) -> None:
        self.opened = asyncio.Event()
        self.inside = 0
        router = APIRouter()
        router.add_api_route("/wait", self.wait, methods=["POST"])
        self.app = service_app("gate", ServiceSettings.model_validate(settings), routers=[router])

    async def wait(self) -> str:
        self.inside += 1
        await self.opened.wait()
        return "through"

    async def holds(self, requests: int) -> None:
        """Return once so many requests wait inside."""
        await async_until(lambda: self.inside >= requests)


def asking(port: int) -> httpx.AsyncClient:
    """A client of the service at that port."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ENDS_WITHIN_S)


@asynccontextmanager
async def serving(app: ASGIApp, http: str = "auto") -> AsyncIterator[int]:
    """Its port while it runs under uvicorn."""
    # Only our own limits end a connection.
    async with served(app, http=http, timeout_keep_alive=600, log_level="error") as url:
        yield port_of(url)


class Raw:
    """A connection that sends what it is told, byte by byte if need be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int, data: bytes = b"") -> "Raw":
        raw = cls(*await asyncio.open_connection("127.0.0.1", port))
        await raw.send(data)
        return raw

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def trickle(self, piece: bytes, every_s: float) -> None:
        """Send a piece again and again until the server hangs up.

        A piece that reaches a closed connection resets it, and a reset may drop an answer that was not read yet.
        """
        try:
            while not self.reader.at_eof():
                await self.send(piece)
                await asyncio.sleep(every_s)
        except ConnectionError:
            return

    async def rest(self, within_s: float = ENDS_WITHIN_S) -> bytes:
        """All that comes until the server closes or resets the connection."""
        received = b""
        async with asyncio.timeout(within_s):
            with suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    received += piece
        return received

    async def one_answer(self) -> bytes:
        async with asyncio.timeout(ENDS_WITHIN_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head + await self.reader.readexactly(length)


@contextmanager
def closing(connections: list[Raw]) -> Iterator[list[Raw]]:
    try:
        yield connections
    finally:
        for connection in connections:
            connection.writer.close()


def error_of(answer: bytes) -> tuple[int, str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return int(head.split()[1]), error["code"], error["message"]


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_header_that_is_not_complete_in_time_is_answered_408_and_the_connection_closed(http: str) -> None:
    async with serving(Gate(header_timeout_s=1.0).app, http) as port:
        connections = [await Raw.to(port), await Raw.to(port, PARTIAL), await Raw.to(port, PARTIAL)]
        with closing(connections):
            silent, partial, slow = connections
            trickling = asyncio.create_task(slow.trickle(b"a", 0.05))
            answers = await asyncio.gather(silent.rest(), partial.rest(), slow.rest())
            await trickling

    late = (408, "request_incomplete", "expected a complete header within 1 s, got a part")
    assert (answers[0], error_of(answers[1])) == (b"", late)
    assert answers[2] == b"" or error_of(answers[2]) == late


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_each_further_header_of_a_connection_has_the_same_time_limit(http: str) -> None:
    async with serving(Gate(header_timeout_s=1.0).app, http) as port:
        raw = await Raw.to(port, WHOLE)
        with closing([raw]):
            first = await raw.one_answer()
            trickling = asyncio.create_task(raw.trickle(b"\r\n", 0.05))  # empty lines are no header yet
            await raw.rest()
            await trickling

    assert first.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_request_in_work_has_no_time_limit_of_its_connection(http: str) -> None:
    gate = Gate(header_timeout_s=1.0)
    async with serving(gate.app, http) as port, asking(port) as client:
        waiting = asyncio.create_task(client.post("/wait"))
        await gate.holds(1)
        late = await Raw.to(port, PARTIAL)
        with closing([late]):
            await late.rest()  # as long as a header may take
        gate.opened.set()
        assert (await waiting).json() == "through"


async def test_half_open_connections_give_way_to_those_that_send_a_request() -> None:
    async with serving(Gate(max_connections=20, header_timeout_s=600.0).app) as port:
        with closing([await Raw.to(port, PARTIAL) for _ in range(60)]) as half_open:
            whole = await Raw.to(port, WHOLE)
            with closing([whole]):
                answer = await whole.one_answer()
                closed = [await raw.rest() for raw in half_open[:41]]
                held = half_open[41:]
                for raw in held:
                    await raw.send(b"\r\n\r\n")
                completed = [await raw.one_answer() for raw in held]

    assert (answer.split()[1], closed) == (b"200", [b""] * 41)
    assert [answer.split()[1] for answer in completed] == [b"200"] * 19


async def test_when_all_connections_are_at_work_a_new_one_is_told_to_come_again() -> None:
    gate = Gate(max_connections=3)
    async with serving(gate.app) as port, asking(port) as client:
        working = [asyncio.create_task(client.post("/wait")) for _ in range(3)]
        await gate.holds(3)
        refused = await Raw.to(port)
        with closing([refused]):
            answer = await refused.rest()
        gate.opened.set()
        texts = [(await task).json() for task in working]

    status, code, message = error_of(answer)
    assert (status, code) == (429, "overloaded")
    assert message.startswith("expected fewer than 3 active connections on this process; retry later")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert texts == ["through"] * 3


async def test_a_header_without_end_is_refused_by_its_size() -> None:
    async with serving(Gate(header_timeout_s=600.0).app) as port:
        raw = await Raw.to(port, PARTIAL)
        with closing([raw]):
            trickling = asyncio.create_task(raw.trickle(b"a" * 16384, 0.001))
            answer = await raw.rest()
            await trickling

    message = f"expected a header of at most {MAX_HEADER_BYTES} bytes, got more; send a shorter one"
    assert answer == b"" or error_of(answer) == (431, "invalid_request", message)


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_body_that_is_not_complete_in_time_is_answered_408_and_its_connection_closed(http: str) -> None:
    part = b"POST /wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\na"
    async with serving(Gate(body_timeout_s=0.3, header_timeout_s=1.0).app, http) as port:
        with closing([await Raw.to(port, part), await Raw.to(port, part)]) as connections:
            stuck, slow = connections
            trickling = asyncio.create_task(slow.trickle(b"a", 0.05))
            answers = await asyncio.gather(stuck.one_answer(), slow.rest())
            await trickling

    message = "expected the whole body within 0.3 s, got a part; send less at once, or faster"
    late = (408, "request_incomplete", message)
    assert error_of(answers[0]) == late
    assert answers[1] == b"" or error_of(answers[1]) == late


async def test_a_replicas_own_port_has_the_limits() -> None:
    gate = Gate()
    port = DirectPort(gate.app, "127.0.0.1", int, 0.0, ConnectionSettings(header_timeout_s=2.0, max_connections=5))
    async with gate.app.router.lifespan_context(gate.app):
        number = int(port.url.rpartition(":")[2])
        with closing([await Raw.to(number, PARTIAL) for _ in range(20)]) as half_open:
            whole = await Raw.to(number, WHOLE)
            with closing([whole]):
                assert (await whole.one_answer()).split()[1] == b"200"
            assert [await raw.rest() for raw in half_open[:15]] == [b""] * 15
            assert error_of(await half_open[-1].rest())[0] == 408


async def test_serves_proxy_takes_the_limits_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKWAY_HEADER_TIMEOUT_S", "1.0")
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])

    assert bound_connections() == []

    plain = FastAPI(openapi_url=None)
    async with serving(plain) as port:
        raw = await Raw.to(port, PARTIAL)
        with closing([raw]):
            assert error_of(await raw.rest())[0] == 408


async def test_a_process_with_few_files_answers_beside_half_open_connections_and_does_not_spin(tmp_path: Path) -> None:
    with service_process("reward", tmp_path, {"header_timeout_s": "8"}, files=100) as service:
        connections = [await Raw.to(service.port, PARTIAL) for _ in range(140)]
        with closing(connections):
            began = time.monotonic()
            healthy = httpx.get(f"http://127.0.0.1:{service.port}/health", timeout=ENDS_WITHIN_S).status_code
            answered_s = time.monotonic() - began
            before = sum(psutil.Process(service.process.pid).cpu_times()[:2])
            await asyncio.gather(*(raw.rest() for raw in connections))
            cpu_s = sum(psutil.Process(service.process.pid).cpu_times()[:2]) - before
        after = httpx.get(f"http://127.0.0.1:{service.port}/health", timeout=ENDS_WITHIN_S).status_code

    assert (healthy, after) == (200, 200)
    assert answered_s < 6.0  # not only once the others' headers were late
    assert cpu_s < 2.0 * slowness()
