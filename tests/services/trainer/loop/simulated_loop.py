"""An event loop in simulated time, for schedules that take hours."""

import asyncio
import selectors


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when all its tasks sleep."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.pass_time(timeout or 0.0)
        return super().select(0)
