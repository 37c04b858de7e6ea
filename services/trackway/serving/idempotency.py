"""A POST runs once per `Idempotency-Key`: a repeated key waits for the first answer, or is given it again.

The work of a keyed request goes on when its client disconnects, since the client will ask again. Answers are kept in
memory, bounded in number, size and age; retryable failures are not kept. A keyed answer is sent when it is complete, so
a client that wants a stream sends no key.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.headers import IDEMPOTENCY_KEY

_RETRYABLE_STATUS = {408, 409, 429, 502, 503, 504}


@dataclass
class _Entry:
    digest: str
    answer: asyncio.Task[list[Message]]
    made_at: float = field(default_factory=time.monotonic)


class Idempotency:
    """ASGI middleware; keeps up to `max_entries` answers of up to `max_bytes` each for `ttl_s` seconds."""

    def __init__(
        self, app: ASGIApp, max_entries: int = 4096, ttl_s: float = 600.0, max_bytes: int = 256 * 1024
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.ttl_s = ttl_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(IDEMPOTENCY_KEY) if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        entry = self._entry(f"{scope['path']} {key}", scope, body)
        for message in await asyncio.shield(entry.answer):
            await send(message)

    def _entry(self, key: str, scope: Scope, body: bytes) -> _Entry:
        self._forget_old()
        digest = hashlib.sha256(body).hexdigest()
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(digest, asyncio.create_task(self._run(key, scope, body)))
            self._entries[key] = entry
        elif entry.digest != digest:
            message = f"{IDEMPOTENCY_KEY} {key.split(' ', 1)[1]!r} was used with another body; take a new key"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        return entry

    async def _run(self, key: str, scope: Scope, body: bytes) -> list[Message]:
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
        size = sum(len(message.get("body", b"")) for message in answer)
        if answer[0]["status"] in _RETRYABLE_STATUS or size > self.max_bytes:
            self._entries.pop(key, None)
        return answer

    def _forget_old(self) -> None:
        """Drop answers from the oldest on; one that is still being made ends the sweep."""
        horizon = time.monotonic() - self.ttl_s
        while self._entries:
            oldest = next(iter(self._entries.values()))
            kept = oldest.made_at >= horizon and len(self._entries) <= self.max_entries
            if kept or not oldest.answer.done():
                return
            self._entries.popitem(last=False)


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TrackwayError(ErrorCode.INVALID_REQUEST, "the client left before its request was complete")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
