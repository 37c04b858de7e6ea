"""Threads for user code that blocks: tools and scorers."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from trackway.serving.user_code import failure_of

T = TypeVar("T")


async def in_thread(call: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """The result of `call`, which runs in a thread. UserCodeExit when it calls `sys.exit` or raises no Exception.

    Waits for the thread even when cancelled: a thread cannot be stopped, and while it runs, a tool's instance must not
    get another call.
    """

    def contained() -> T:
        try:
            return call()
        except Exception:
            raise
        except BaseException as error:  # SystemExit would leave the event loop from the task below
            raise failure_of(error) from error

    work = asyncio.create_task(anyio.to_thread.run_sync(contained, limiter=limiter))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
