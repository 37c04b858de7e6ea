"""The tokens that the calls of one session may write together: each call reserves its share before it generates."""

import asyncio


class TokenBudget:
    """`most` tokens, or any number for None."""

    def __init__(self, most: int | None) -> None:
        self._left = most
        self._reserved = 0
        self._changed = asyncio.Event()

    def must_wait(self, wanted: int, choices: int) -> bool:
        """Return whether other calls hold some of what a call wants: `wanted` tokens for each of its choices."""
        return self._left is not None and self._reserved > 0 and (self._left - self._reserved) // choices < wanted

    async def freed(self, wanted: int, choices: int, ended: asyncio.Event) -> None:
        """Wait until a call need not wait for others, at most until the session has ended."""
        while self.must_wait(wanted, choices) and not ended.is_set():
            self._changed.clear()
            await self._changed.wait()

    def reserve(self, wanted: int, choices: int) -> int:
        """Tokens for each choice of a call: `wanted`, or what is left if that is fewer; 0 when none is left."""
        if self._left is None:
            return wanted
        room = min(wanted, max(0, self._left - self._reserved) // choices)
        self._reserved += room * choices
        return room

    def written(self, tokens: int) -> None:
        """Take off what a call wrote."""
        if self._left is not None:
            self._left -= tokens

    def release(self, tokens: int) -> None:
        """Give back what a call reserved, once it has ended."""
        self._reserved -= tokens
        self._changed.set()

    def wake(self) -> None:
        """Let waiting calls see that the session has ended."""
        self._changed.set()
