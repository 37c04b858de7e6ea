"""The process's one HTTP client: what it costs to make, and when a connection is given up."""

import asyncio
import gzip
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest

from trackway.clients import close_shared_http, shared_http
from trackway.clients.failures import unsent
from trackway.clients.http_client import WholeResponse, fetch

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


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


async def fetched(url: str) -> WholeResponse:
    return await fetch(shared_http(), "GET", url, {"accept": "*/*"}, None, connect_s=5.0, read_s=5.0)


async def test_a_whole_response_has_its_content_decoded_and_its_headers_by_any_case() -> None:
    body = gzip.compress(b'{"said": "18"}')
    head = f"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    async with server(head.encode() + body) as url:
        response = await fetched(url)
    assert (response.method, response.url, response.status_code, response.is_success) == ("GET", url, 503, False)
    assert (response.text, response.headers.get("retry-after")) == ('{"said": "18"}', "3")


async def test_a_response_that_is_cut_is_an_error_of_its_transport_that_was_sent() -> None:
    async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{") as url:
        with pytest.raises(httpx.TransportError) as cut:
            await fetched(url)
    assert not unsent(cut.value)


async def test_a_refused_connection_is_an_error_of_its_transport_that_was_not_sent() -> None:
    async with server(b"") as url:
        pass
    with pytest.raises(httpx.TransportError) as refused:
        await fetched(url)
    await close_shared_http()
    assert unsent(refused.value)


async def test_certificates_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ssl.SSLContext] = []
    load = ssl.SSLContext.load_verify_locations

    def count(context: ssl.SSLContext, *args: str, **kwargs: str) -> None:
        loaded.append(context)
        load(context, *args, **kwargs)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    with pytest.raises(httpx.TransportError):
        await shared_http().get("https://127.0.0.1:1")
    await close_shared_http()
    assert len(loaded) == 1
