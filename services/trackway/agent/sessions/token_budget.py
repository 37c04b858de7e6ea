"""The tokens that the calls of one session may write together: each call reserves its share before it generates."""

import asyncio


class TokenBudget:
    """`most` tokens, or any number for None."""

    def __init__(self, most: int | None) -> None:
        self._left = most
        self._reserved = 0
        self._changed = asyncio.Event()

    async def reserve(self, wanted: int, choices: int, ended: asyncio.Event) -> int:
        """Tokens for each choice of a call: `wanted`, or what is left if that is fewer; 0 when none is left.

        Waits while other calls hold what is wanted, at most until the session has ended.
        """
        if self._left is None:
            return wanted
        while self._reserved and (self._left - self._reserved) // choices < wanted and not ended.is_set():
            self._changed.clear()
            await self._changed.wait()
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
