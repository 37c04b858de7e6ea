"""The process's one HTTP client, and how a program ends with it."""

import asyncio
import weakref
from collections.abc import Coroutine
from typing import TypeVar

import httpx
from httpx_aiohttp import AiohttpTransport

T = TypeVar("T")

_SILENCE_S = 120.0

_shared: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = weakref.WeakKeyDictionary()


def shared_http() -> httpx.AsyncClient:
    """The process's HTTP client (one per event loop); timeouts are given per request.

    aiohttp's transport: httpx's own pool costs O(n^2) in connections, 12 ms of CPU a request at 96 in flight.
    """
    loop = asyncio.get_running_loop()
    client = _shared.get(loop)
    if client is None or client.is_closed:
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=256, keepalive_expiry=5.0)
        transport = AiohttpTransport(limits=limits)
        client = _shared[loop] = httpx.AsyncClient(transport=transport, timeout=_SILENCE_S)
    return client


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
