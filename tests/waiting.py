"""Wait for a condition, with a deadline."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
WITHIN_S = 120.0
"""A busy machine may need it; a condition that came true is seen at once."""


def until(
    condition: Callable[[], T | None],
    within_s: float = WITHIN_S,
    state: Callable[[], object] = str,
    ignored: type[Exception] | tuple[()] = (),
) -> T:
    """Return the condition's first true value. Raises AssertionError with its source and `state()` at the deadline.

    While the condition raises an exception of the type `ignored`, it is not true.
    """
    for pause_s in _pauses(condition, within_s, state):
        try:
            if value := condition():
                return value
        except ignored:
            pass
        time.sleep(pause_s)
    raise NotImplementedError


async def async_until(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Return once the condition, or what it awaits, is true. Raises AssertionError with its source at the deadline."""
    for pause_s in _pauses(condition, within_s, str):
        value = condition()
        if await value if isinstance(value, Awaitable) else value:
            return
        await asyncio.sleep(pause_s)


def _pauses(condition: Callable[[], object], within_s: float, state: Callable[[], object]) -> Iterator[float]:
    """Yield the seconds to the next look: a twentieth of the time waited so far, from 1 ms to 200 ms."""
    start = time.monotonic()
    while (waited_s := time.monotonic() - start) < within_s:
        yield min(max(waited_s / 20, 0.001), 0.2)
    raise AssertionError(f"not true within {within_s:g} s: {inspect.getsource(condition).strip()} {state()}")
