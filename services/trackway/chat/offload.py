"""Run work on large texts or token lists in a thread, so that it does not block the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INLINE_SIZE = 16384
"""Inputs up to this size (about a millisecond of work) are not worth a thread."""


async def offload(size: int, function: Callable[..., T], *args: object) -> T:
    """Run `function` directly when its input is small, else in a thread."""
    if size <= _INLINE_SIZE:
        return function(*args)
    return await asyncio.to_thread(function, *args)
