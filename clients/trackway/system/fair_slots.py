"""Slots that several runs share."""

import asyncio
from collections import Counter, deque


class FairSlots:
    """A bounded number of slots. A free one goes to the waiting run that holds the fewest, in turn."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, run: str) -> None:
        """Take a slot for the run, once there is one."""
        if self._free:
            self._free -= 1
            self._held[run] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(run, deque())
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(run)
            else:
                self._leave(run, turn)
            raise

    def release(self, run: str) -> None:
        """Give a slot of the run back."""
        self._held[run] -= 1
        if not self._held[run]:
            del self._held[run]
        if not self._waiting:
            self._free += 1
            return
        first = min(self._waiting, key=lambda name: self._held[name])
        turn = self._waiting[first][0]
        self._leave(first, turn)
        if first in self._waiting:  # last among runs that hold as many
            self._waiting[first] = self._waiting.pop(first)
        self._held[first] += 1
        turn.set_result(None)

    def _leave(self, run: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting[run]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[run]
