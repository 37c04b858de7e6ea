"""Runs a POST once per `Idempotency-Key`: a repeated key waits for the first response, or gets it again.

A keyed request continues when its client disconnects, since the client will retry. Responses are kept in memory,
limited in number, bytes and age. Transient errors are not kept, as nothing was done. A keyed response is sent when it
is complete, so a client that streams must not send a key.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.serving.auth import CALLER, Caller
from trackway.serving.limits import header_of
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import IDEMPOTENCY_KEY

UNBROKEN = "trackway.unbroken"
"""Key of the ASGI scope: true if running requests are never cancelled and need no task of their own."""

_NOTHING_DONE = {409, 429, 503}
"""Not 504: work may have had its effect when its deadline passed."""
_ENTRY_BYTES = 2048
"""Bytes of an entry without its body."""


class _Key(NamedTuple):
    caller: Caller | None
    path: str
    header: str


@dataclass
class _Entry:
    digest: str
    answer: asyncio.Future[list[Message]]
    made_at: float
    bytes: int = 0


class Idempotency:
    """ASGI middleware. Keeps up to `max_entries` responses, `max_bytes` in all, for `ttl_s` seconds; always the newest.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_entries: int = 32_768,
        ttl_s: float = 600.0,
        max_bytes: int = 128 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self.clock = clock
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.ttl_s = ttl_s
        self._bytes = 0
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = header_of(scope, IDEMPOTENCY_KEY.encode()) if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        for message in await self._answer(_Key(scope.get(CALLER), scope["path"], key), scope, body):
            await send(message)

    async def _answer(self, key: _Key, scope: Scope, body: bytes) -> list[Message]:
        self._forget_old()
        digest = hashlib.sha256(body).hexdigest()
        entry = self._entries.get(key)
        if entry is None:
            return await self._first_answer(key, digest, scope, body)
        if entry.digest != digest:
            message = f"{IDEMPOTENCY_KEY} {key.header!r} was used with another body; take a new key"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        return await asyncio.shield(entry.answer)

    async def _first_answer(self, key: _Key, digest: str, scope: Scope, body: bytes) -> list[Message]:
        if not scope.get(UNBROKEN):
            work = asyncio.create_task(self._run(key, scope, body))
            self._entries[key] = _Entry(digest, work, self.clock())
            return await asyncio.shield(work)
        answer = asyncio.get_running_loop().create_future()
        self._entries[key] = _Entry(digest, answer, self.clock())
        try:
            answer.set_result(await self._run(key, scope, body))
        except BaseException as error:
            answer.set_exception(error)
            answer.exception()  # no other request may be waiting for it
            raise
        return answer.result()

    async def _run(self, key: _Key, scope: Scope, body: bytes) -> list[Message]:
        answer: list[Message] = []
        received = False

        async def receive() -> Message:
            nonlocal received
            if received:
                await asyncio.Event().wait()
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            answer.append(message)

        try:
            await self.app(scope, receive, send)
        except BaseException:
            self._entries.pop(key, None)
            raise
        if answer[0]["status"] in _NOTHING_DONE:
            del self._entries[key]
        else:
            entry = self._entries[key]
            entry.bytes = _ENTRY_BYTES + sum(len(message.get("body", b"")) for message in answer)
            self._bytes += entry.bytes
        return answer

    def _forget_old(self) -> None:
        """Drop responses from the oldest on. Stops at one that is still in progress."""
        horizon = self.clock() - self.ttl_s
        while self._entries:
            oldest = next(iter(self._entries.values()))
            within = len(self._entries) <= self.max_entries and self._bytes <= self.max_bytes
            if (within and oldest.made_at >= horizon) or not oldest.answer.done():
                return
            self._entries.popitem(last=False)
            self._bytes -= oldest.bytes


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TrackwayError(ErrorCode.REQUEST_INCOMPLETE, "the client disconnected before its request was complete")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
