"""Slots that several runs share."""

import asyncio
from collections import Counter, deque


class FairSlots:
    """A bounded number of slots. A free one goes to the waiting run that holds the fewest, in turn."""

    def __init__(self, number: int) -> None:
        self._number = self._free = number
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, run: str) -> None:
        """Take a slot for the run, once there is one."""
        if self._free > 0:
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
        self._free += 1
        self._give()

    @property
    def held(self) -> int:
        """Slots that are taken."""
        return self._number - self._free

    def resize(self, number: int) -> None:
        """Set the number of slots. Where more are taken, no further one is free until enough are given back."""
        self._free += number - self._number
        self._number = number
        while self._free > 0 and self._waiting:
            self._give()

    def _give(self) -> None:
        """Give a free slot to the run that waits and holds the fewest."""
        if self._free <= 0 or not self._waiting:
            return
        self._free -= 1
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
