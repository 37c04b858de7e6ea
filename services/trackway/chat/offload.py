"""Work on text or token ids that would hold up the event loop when there is much of it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INLINE_SIZE = 16384
"""Characters or ids up to which the work (about a millisecond) is not worth a thread."""


async def offload(size: int, function: Callable[..., T], *args: object) -> T:
    """Run `function` here when its input is small, else in a thread, so that the event loop goes on."""
    if size <= _INLINE_SIZE:
        return function(*args)
    return await asyncio.to_thread(function, *args)
