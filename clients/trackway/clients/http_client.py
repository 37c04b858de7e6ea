"""The process's shared HTTP client, and `run` for programs that use it."""

import asyncio
import socket
import ssl
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

import httpx

if TYPE_CHECKING:
    import aiohttp
    from httpx_aiohttp import AiohttpTransport

T = TypeVar("T")
_AddrInfo = tuple[int, int, int, str, tuple[object, ...]]
"""Family, kind, protocol, canonical name and address, as from `socket.getaddrinfo`."""

_SILENCE_S = 120.0
_GONE_S = 20
"""Seconds without acknowledgement from the other machine after which a connection breaks. A slow service does not break
it, unless it stops reading a body larger than both socket buffers, a few megabytes."""
_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": _GONE_S * 1000}
"""Socket options of each connection, where the system has them; the last bounds the total and exists on Linux only."""

_shared: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = weakref.WeakKeyDictionary()


def shared_http() -> httpx.AsyncClient:
    """The process's HTTP client (one per event loop); timeouts are given per request.

    aiohttp's transport: httpx's own pool costs O(n^2) in connections, 12 ms of CPU a request at 96 in flight.
    """
    loop = asyncio.get_running_loop()
    client = _shared.get(loop)
    if client is None or client.is_closed:
        from httpx_aiohttp import AiohttpTransport  # late, with aiohttp: a third of the time to import the clients

        tls = httpx.create_ssl_context()
        transport = AiohttpTransport(verify=tls, client=_session(tls))
        client = _shared[loop] = _PlainClient(transport)
    return client


class _PlainClient(httpx.AsyncClient):
    """Hands requests to aiohttp as they are: no redirects, cookies or authentication, nor httpx's streams.

    That saves CPU in small calls.
    """

    def __init__(self, transport: "AiohttpTransport") -> None:
        super().__init__(transport=transport, timeout=_SILENCE_S)
        self._plain_transport = transport

    async def send(self, request: httpx.Request, *, stream: bool = False, **_: object) -> httpx.Response:
        """The response, read to its end unless `stream` is set; raises httpx.TransportError."""
        if self.is_closed:
            raise RuntimeError("expected an open HTTP client, got one that is closed")
        if stream:
            return await self._plain_transport.handle_async_request(request)
        return await self._whole(request)

    async def _whole(self, request: httpx.Request) -> httpx.Response:
        from aiohttp import ClientTimeout
        from httpx_aiohttp.transport import map_aiohttp_exceptions

        timeout = request.extensions["timeout"]
        limits = ClientTimeout(sock_connect=timeout["connect"], sock_read=timeout["read"], connect=timeout["pool"])
        with map_aiohttp_exceptions():
            async with self._plain_transport.get_client().request(
                request.method,
                str(request.url),
                headers=request.headers,
                data=request.content or None,
                allow_redirects=False,
                auto_decompress=False,
                timeout=limits,
            ) as answer:
                content = await answer.read()
        body = httpx.ByteStream(content)
        response = httpx.Response(answer.status, headers=answer.raw_headers, stream=body, request=request)
        response.read()
        return response


def _session(tls: ssl.SSLContext) -> "aiohttp.ClientSession":
    import aiohttp

    connector = aiohttp.TCPConnector(limit=512, keepalive_timeout=5.0, ssl=tls, socket_factory=_watched)
    return aiohttp.ClientSession(connector=connector)


def _watched(address: _AddrInfo) -> socket.socket:
    """A socket with keepalive, which detects a lost machine or a cut link."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


async def close_shared_http() -> None:
    """Close this event loop's shared client; a later call creates a new one."""
    client = _shared.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


def run(work: Coroutine[object, object, T]) -> T:
    """Like `asyncio.run`, and closes the shared HTTP client at the end."""

    async def main() -> T:
        try:
            return await work
        finally:
            await close_shared_http()

    return asyncio.run(main())
