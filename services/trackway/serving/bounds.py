"""What a request may be before anybody works on it: its body's size and depth, and the headers that are read here.

The body is read once, in whole, and handed on in one piece.
"""

import re
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.headers import IDEMPOTENCY_KEY, REQUEST_DEADLINE, SESSION_ID

_TEXT = re.compile(rb"[\x20-\x7e]{1,256}"), "1 to 256 printable ASCII characters"
_TIME = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,9})?"), "Unix time in seconds, e.g. 1767225600.5"
_HEADERS = {SESSION_ID.encode(): _TEXT, IDEMPOTENCY_KEY.encode(): _TEXT, REQUEST_DEADLINE.encode(): _TIME}

_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "DELETE")
_ANNOUNCES_BODY = (b"content-length", b"transfer-encoding")

_BESIDE_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_STEP = [(byte == ord("[")) - (byte == ord("]")) for byte in range(256)]


class RequestBounds:
    """ASGI middleware: 413 for a body over `max_bytes`, 422 for JSON deeper than `max_depth` and for odd headers."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_depth: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_depth = max_depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._has_body(scope):
            body = await self._read(receive)
            if b"\0" in body or deeper_than(self.max_depth, body):
                message = (
                    f"expected JSON in UTF-8 of at most {self.max_depth} levels, got another body; send it flatter"
                )
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
            receive = again({"type": "http.request", "body": body, "more_body": False}, receive)
        await self.app(scope, receive, send)

    def _has_body(self, scope: Scope) -> bool:
        announced = False
        for name, value in scope["headers"]:
            if name in _HEADERS:
                _check_header(name, value)
            elif name in _ANNOUNCES_BODY:
                announced = True
                if name == b"content-length" and value.isdigit() and int(value) > self.max_bytes:
                    raise self._too_large(int(value))
        return announced or scope["method"] not in _WITHOUT_BODY

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise TrackwayError(ErrorCode.INVALID_REQUEST, "the client left before its request was complete")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_bytes:
                raise self._too_large(size)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self, size: int) -> TrackwayError:
        message = f"expected a body of at most {self.max_bytes} bytes, got {size} or more; send less at once"
        return TrackwayError(ErrorCode.PAYLOAD_TOO_LARGE, message)


def deeper_than(depth: int, body: bytes) -> bool:
    """Whether JSON in UTF-8 nests deeper, without parsing it; a guess either way when it is no valid JSON.

    Few bodies have more than `depth` brackets at all; for the others, what stands in strings is taken away first.
    """
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    if b'\\"' in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = b"".join(body.translate(_ONE_KIND, _BESIDE_STRUCTURE).split(b'"')[::2])
    inner = structure.replace(b"[]", b"")  # one level less, and far shorter
    return any(map(depth.__le__, accumulate(map(_STEP.__getitem__, inner))))


def _check_header(name: bytes, value: bytes) -> None:
    pattern, expected = _HEADERS[name]
    if pattern.fullmatch(value) is None:
        message = f"{name.decode()}: expected {expected}, got {value[:64]!r} ({len(value)} bytes)"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


def again(message: Message, receive: Receive) -> Receive:
    """A receive that gives a message that was taken before, then what `receive` gives."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return message

    return replay
