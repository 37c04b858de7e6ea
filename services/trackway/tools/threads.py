"""Threads for tools that block."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def in_thread(call: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """The result of `call`, which runs in a thread.

    Ends no sooner than the thread does, also when cancelled: nothing can stop a thread, and while it runs, the call's
    instance must be given no other one.
    """
    work = asyncio.create_task(anyio.to_thread.run_sync(call, limiter=limiter))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
