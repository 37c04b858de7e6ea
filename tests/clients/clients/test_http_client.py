"""The process's one HTTP client: what it costs to make, and when a connection is given up."""

import asyncio
import gzip
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest
from pydantic import SecretStr

from trackway.clients import CallPolicy, close_shared_http, run, shared_http
from trackway.clients.base import ServiceClient
from trackway.clients.http_client import WholeResponse, fetch, resolve_token, using_token
from trackway.clients.retry import incident_of, unsent
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Incident

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

Call = Callable[..., Awaitable[WholeResponse]]


@asynccontextmanager
async def server(answer: bytes) -> AsyncGenerator[str]:
    """The URL of a server that gives this answer to each request, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/path"
    finally:
        listening.close()
        await close_shared_http()


async def fetched(url: str, connect_s: float = 5.0) -> WholeResponse:
    return await fetch(shared_http(), "GET", url, {"accept": "*/*"}, None, connect_s=connect_s, read_s=5.0)


async def sent(url: str, connect_s: float = 5.0) -> WholeResponse:
    response = await shared_http().get(url, timeout=httpx.Timeout(5.0, connect=connect_s))
    return WholeResponse.of(response)


async def test_a_whole_response_has_its_content_decoded_and_its_headers_by_any_case() -> None:
    body = gzip.compress(b'{"said": "18"}')
    head = f"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    async with server(head.encode() + body) as url:
        response = await fetched(url)
    assert (response.method, response.url, response.status_code, response.is_success) == ("GET", url, 503, False)
    assert (response.text, response.headers.get("retry-after")) == ('{"said": "18"}', "3")


CALLS = {"fetch": fetched, "send": sent}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"])
async def test_a_connection_that_breaks_is_no_timeout(call: Call, answer: bytes) -> None:
    async with server(answer) as url:
        with pytest.raises(httpx.NetworkError) as broken:
            await call(url)
    assert (unsent(broken.value), incident_of(broken.value)) == (False, Incident.REPLICA_LOST)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_refused_connection_names_the_address(call: Call) -> None:
    async with server(b"") as url:
        pass
    with pytest.raises(httpx.ConnectError) as refused:
        await call(url)
    await close_shared_http()
    assert f"{refused.value}" == f"connection refused at {httpx.URL(url).netloc.decode()}"
    assert (unsent(refused.value), incident_of(refused.value)) == (True, Incident.REPLICA_LOST)


async def test_an_error_of_a_client_says_that_the_connection_was_refused() -> None:
    async with server(b"") as url:
        pass
    client = ServiceClient(url, policy=CallPolicy.question(5.0))
    with pytest.raises(TrackwayError) as refused:
        await client.send("GET", "/ready")
    await close_shared_http()
    address = httpx.URL(url).netloc.decode()
    said = f"GET {url}/ready: no answer after 1 attempts (ConnectError: connection refused at {address}); check"
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_connection_that_nothing_accepts_is_a_timeout(call: Call) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        with ExitStack() as waiting:  # they fill the queue of connections
            for _ in range(4):
                connection = waiting.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(address)
            url = f"http://127.0.0.1:{address[1]}"
            with pytest.raises(httpx.ConnectTimeout) as late:
                await call(url, 0.1)
    await close_shared_http()
    assert (unsent(late.value), incident_of(late.value)) == (True, Incident.RETRIED)


async def test_certificates_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ssl.SSLContext] = []
    this_thread = threading.get_ident()
    load = ssl.SSLContext.load_verify_locations

    def count(context: ssl.SSLContext, *args: str, **kwargs: str) -> None:
        if threading.get_ident() == this_thread:  # others load their own
            loaded.append(context)
        load(context, *args, **kwargs)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    with pytest.raises(httpx.TransportError):
        await shared_http().get("https://127.0.0.1:1")
    await close_shared_http()
    assert len(loaded) == 1


def test_run_closes_the_client_that_its_work_used() -> None:
    async def used() -> httpx.AsyncClient:
        return shared_http()

    assert run(used()).is_closed


async def test_run_works_beside_a_running_loop_and_keeps_the_context() -> None:
    async def token() -> str:
        found = resolve_token()
        return "none" if found is None else found.get_secret_value()

    with using_token(SecretStr("of-this-context")):
        assert run(token()) == "of-this-context"
    assert run(token()) == "none"


async def test_an_error_beside_a_running_loop_is_raised_as_it_is() -> None:
    async def fails() -> None:
        raise TrackwayError(ErrorCode.CONFLICT, "taken")

    with pytest.raises(TrackwayError, match="taken"):
        run(fails())


def test_each_interrupt_beside_a_running_loop_cancels_the_work() -> None:
    code = """
import asyncio, signal, sys, threading
from trackway.clients import run

cancelled = interrupted = 0
sys.setswitchinterval(1e-5)

async def work():
    global cancelled
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled += 1
        raise

async def notebook():
    global interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(1000):
        try:
            run(work())
        except KeyboardInterrupt:
            interrupted += 1

asyncio.run(notebook())
print(cancelled, interrupted)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "1000 1000\n"
