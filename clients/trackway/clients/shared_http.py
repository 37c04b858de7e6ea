"""The process's one HTTP client, and how a program ends with it."""

import asyncio
import socket
import ssl
import weakref
from collections.abc import Coroutine
from functools import partial
from typing import TypeVar

import aiohttp
import httpx
from aiohttp.connector import AddrInfoType
from httpx_aiohttp import AiohttpTransport

T = TypeVar("T")

_SILENCE_S = 120.0
_GONE_S = 20
"""A connection breaks after so long without a sign of life from the other machine. A silent service breaks none, unless
it reads nothing for so long and the body is larger than what the two systems keep for it: some megabytes at most."""
_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": _GONE_S * 1000}
"""Of each connection, where the system has the option; the last bounds all and is Linux's."""

_shared: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = weakref.WeakKeyDictionary()


def shared_http() -> httpx.AsyncClient:
    """The process's HTTP client (one per event loop); timeouts are given per request.

    aiohttp's transport: httpx's own pool costs O(n^2) in connections, 12 ms of CPU a request at 96 in flight.
    """
    loop = asyncio.get_running_loop()
    client = _shared.get(loop)
    if client is None or client.is_closed:
        tls = httpx.create_ssl_context()
        transport = AiohttpTransport(verify=tls, client=partial(_session, tls))
        client = _shared[loop] = httpx.AsyncClient(transport=transport, timeout=_SILENCE_S)
    return client


def _session(tls: ssl.SSLContext) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=512, keepalive_timeout=5.0, ssl=tls, socket_factory=_watched)
    return aiohttp.ClientSession(connector=connector)


def _watched(address: AddrInfoType) -> socket.socket:
    """A socket that notices when the other machine is gone: a cut link says nothing by itself."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if option := getattr(socket, name, None):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def close_shared_http() -> None:
    """Close this event loop's shared client; a later call makes a new one."""
    client = _shared.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


def run(work: Coroutine[object, object, T]) -> T:
    """`asyncio.run` for programs that call services: the shared client is closed at the end."""

    async def main() -> T:
        try:
            return await work
        finally:
            await close_shared_http()

    return asyncio.run(main())
