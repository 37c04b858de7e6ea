"""Limits of connections, of a request before parsing (bytes, JSON values, headers), and of sessions that callers open.

A parsed value takes up to 800 bytes, however short it is in the body, so values are counted in the raw bytes.
The body is read once, completely, and passed on in one piece.

Open sessions are limited in all, and for one caller. An idle session makes room for another one.

uvicorn does not limit connections: one that never completes a header stays open. A subclass of its HTTP protocol limits
their number, and the size and time of a header, on the server of a service (`bound_server`), at a replica's own port
and in Ray Serve's proxy. A connection *waits* while it has no active request: it is new, idle, or within a header. With
too many connections the longest waiting one is closed, and a new one is refused only if all are active.
"""

import asyncio
import io
import logging
import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, cast

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from trackway.serving.routes import retry_after
from trackway.serving.settings import ConnectionSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import IDEMPOTENCY_KEY, REQUEST_TIMEOUT, SESSION_ID

_TEXT = re.compile(rb"[\x20-\x7e]{1,256}"), "1 to 256 printable ASCII characters"
_SECONDS = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,9})?"), "seconds, e.g. 59.5"
_HEADERS = {SESSION_ID.encode(): _TEXT, IDEMPOTENCY_KEY.encode(): _TEXT, REQUEST_TIMEOUT.encode(): _SECONDS}

_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "DELETE")
_ANNOUNCES_BODY = (b"content-length", b"transfer-encoding")

_CHUNK = 256 * 1024
"""Bytes per chunk from which strings are removed."""


class JsonSize(NamedTuple):
    """The amount of JSON to parse."""

    items: int
    """Commas: list items and object members beyond the first of each list or object."""
    nodes: int
    """Lists, objects and object members."""

    def exceeds(self, limit: "JsonSize") -> bool:
        """Return whether either exceeds the limit."""
        return self.items > limit.items or self.nodes > limit.nodes


class RequestBounds:
    """ASGI middleware: 413 for a body over `max_bytes` or with more JSON than `max_json`.

    422 for odd headers, and 408 for a body that is not complete after `timeout_s` seconds.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_json: JsonSize, timeout_s: float = 60.0) -> None:
        self.app = app
        self.timeout_s = timeout_s
        self.max_bytes = max_bytes
        self.max_json = max_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._has_body(scope):
            body = await self._read_in_time(receive)
            is_json = header_of(scope, b"content-type") != "application/x-protobuf"  # which no route of JSON takes
            if is_json and json_exceeds(self.max_json, body):
                message = (
                    f"expected JSON of at most {self.max_json.items} items, and {self.max_json.nodes} lists, objects "
                    "and object members, got more; send less at once"
                )
                raise TrackwayError(ErrorCode.PAYLOAD_TOO_LARGE, message)
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

    async def _read_in_time(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._read(receive)
        except TimeoutError:
            message = f"expected the whole body within {self.timeout_s:g} s, got a part; send less at once, or faster"
            raise TrackwayError(ErrorCode.REQUEST_INCOMPLETE, message) from None

    async def _read(self, receive: Receive) -> bytes:
        body = io.BytesIO()  # returns its bytes without a copy, so that they are in memory once
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise TrackwayError(
                    ErrorCode.REQUEST_INCOMPLETE, "the client disconnected before its request was complete"
                )
            body.write(message.get("body", b""))
            if body.tell() > self.max_bytes:
                raise self._too_large(body.tell())
            if not message.get("more_body", False):
                return body.getvalue()

    def _too_large(self, size: int) -> TrackwayError:
        message = f"expected a body of at most {self.max_bytes} bytes, got {size} or more; send less at once"
        return TrackwayError(ErrorCode.PAYLOAD_TOO_LARGE, message)


def json_exceeds(limit: JsonSize, body: bytes) -> bool:
    """Return whether JSON in UTF-8 exceeds `limit`, without parsing it. For other bytes the result is a guess.

    Most bodies have few commas, colons and brackets. Otherwise those within strings are excluded.
    """
    return len(body) > min(limit) and _size(body).exceeds(limit) and _exceeds_outside_strings(limit, body)


def _exceeds_outside_strings(limit: JsonSize, body: bytes) -> bool:
    if b'\\"' in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    items = nodes = in_string = 0
    for start in range(0, len(body), _CHUNK):
        parts = body[start : start + _CHUNK].split(b'"')
        size = _size(b"".join(parts[in_string::2]))
        items, nodes = items + size.items, nodes + size.nodes
        if JsonSize(items, nodes).exceeds(limit):
            return True
        in_string = (in_string + len(parts) - 1) % 2
    return False


def _size(text: bytes) -> JsonSize:
    return JsonSize(items=text.count(b","), nodes=text.count(b"[") + text.count(b"{") + text.count(b":"))


def _check_header(name: bytes, value: bytes) -> None:
    pattern, expected = _HEADERS[name]
    if pattern.fullmatch(value) is None:
        message = f"{name.decode()}: expected {expected}, got {value[:64]!r} ({len(value)} bytes)"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


def header_of(scope: Scope, name: bytes) -> str | None:
    """The value of the first header of this name, in lower case, or None without one."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def again(message: Message, receive: Receive) -> Receive:
    """A `receive` that replays a message, then continues with `receive`."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return message

    return replay


@dataclass
class _Open:
    caller: str
    used_at: float = field(default_factory=time.monotonic)
    requests: int = 0
    """Requests in progress."""


class OpenSessions:
    """Open sessions by id, at most `most`, and `most_of_one`, if given, of one caller.

    settings: names of these two settings, for messages.
    room_s: seconds without a request after which a session is ended if another one needs its room.
    """

    def __init__(self, most: int, most_of_one: int | None, room_s: float, settings: tuple[str, str]) -> None:
        self._most, self._most_of_one, self._room_s, self._settings = most, most_of_one, room_s, settings
        self._open: dict[str, _Open] = {}

    def to_end(self, caller: str) -> str | None:
        """The session to end before the caller opens another one, or None if there is room. Raises OVERLOADED."""
        candidates, most, setting = self._open, self._most, self._settings[0]
        own = {session_id: session for session_id, session in self._open.items() if session.caller == caller}
        if self._most_of_one is not None and len(own) >= self._most_of_one:
            candidates, most, setting = own, self._most_of_one, self._settings[1]
        if len(candidates) < most:
            return None
        idle = [(session.used_at, session_id) for session_id, session in candidates.items() if session.requests == 0]
        used_at, session_id = min(idle, default=(float("inf"), ""))
        if time.monotonic() - used_at >= self._room_s:
            return session_id
        whose = "" if candidates is self._open else f" of {caller!r}"
        raise TrackwayError(
            ErrorCode.OVERLOADED,
            f"expected fewer than {most} open sessions{whose} on this replica ({setting}), got as many; end some, or "
            f"ask again once one has been idle for {self._room_s:g} s",
        )

    def add(self, session_id: str, caller: str) -> None:
        """Count the session until it is removed."""
        self._open[session_id] = _Open(caller)

    def remove(self, session_id: str) -> str | None:
        """The caller of a session that has ended, or None for an unknown one."""
        removed = self._open.pop(session_id, None)
        return None if removed is None else removed.caller

    @contextmanager
    def in_use(self, session_id: str | None) -> Iterator[None]:
        """A request of the session, for the duration of the block."""
        session = None if session_id is None else self._open.get(session_id)
        if session is None:
            yield
            return
        session.requests += 1
        try:
            yield
        finally:
            session.requests -= 1
            session.used_at = time.monotonic()


logger = logging.getLogger("trackway.serving")

MAX_HEADER_BYTES = 64 * 1024
"""Limit of a header, checked after its first chunk, which is at most 256 KiB."""
_WARN_EVERY_S = 60.0
_HEAD = b"HTTP/1.1 "


class JoinedWrites:
    """A transport that sends the head of a response together with the body's first part, if that comes at once.

    uvicorn writes them one after the other, and each write is a system call and wakes the client.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the data. A head waits until the next write, or the next iteration of the event loop."""
        if self._head is None and data.startswith(_HEAD):
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._head is not None:
            self._head, parts = None, [self._head, data]
            self._transport.writelines(parts)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what waits, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        self._head, head = None, self._head
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


class BoundedProtocol(asyncio.Protocol):
    """Mixin for uvicorn's HTTP protocols. `bounded_protocol` makes a class of both for each server."""

    settings: ClassVar[ConnectionSettings]
    max_connections: ClassVar[int]
    held: ClassVar[set["BoundedProtocol"]]
    """All counted connections."""
    waiting: ClassVar[dict["BoundedProtocol", None]]
    """Waiting connections, longest first."""
    warned_at: ClassVar[float] = float("-inf")

    # uvicorn's
    cycle: Any
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    _timer: asyncio.TimerHandle | None = None
    _received = False
    _in_header = False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", JoinedWrites(cast("asyncio.Transport", transport))))
        self.held.add(self)
        self._wait()
        if len(self.held) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        in_header, self._received = self._in_header, True
        super().data_received(data)
        if self not in self.connections or self._in_work:  # the first one, which is now a web socket
            self._stop_waiting()
        elif self._timer is None:
            self._wait()
        if in_header and self._in_header:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(
                    431, f"expected a header of at most {MAX_HEADER_BYTES} bytes, got more; send a shorter one"
                )

    # An attribute of httptools' parser; h11's has its own limit.

    def on_message_begin(self) -> None:
        self._in_header, self._header_bytes = True, 0
        super().on_message_begin()  # pyright: ignore[reportAttributeAccessIssue]

    def on_headers_complete(self) -> None:
        self._in_header = False
        super().on_headers_complete()  # pyright: ignore[reportAttributeAccessIssue]

    def on_response_complete(self) -> None:
        super().on_response_complete()  # pyright: ignore[reportAttributeAccessIssue]
        if not self._in_work and not self.transport.is_closing():
            self._received = False
            self.waiting[self] = None  # uvicorn's own timer closes an idle connection

    @property
    def _in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.settings.header_timeout_s, self._late)
        self.waiting[self] = None

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        self._stop_waiting()
        self.held.discard(self)

    def _late(self) -> None:
        self._timer = None
        if self._in_work or self.transport.is_closing():
            return
        if self._in_header or (self._received and self.cycle is None):
            message = f"expected a complete header within {self.settings.header_timeout_s:g} s, got a part"
            self._refuse(408, TrackwayError(ErrorCode.REQUEST_INCOMPLETE, message))
            return
        self._forget()
        self.transport.close()

    def _make_room(self) -> None:
        longest = next(iter(self.waiting))
        if longest is not self:
            longest._forget()
            longest.transport.close()
            self._warn("closed a connection without an active request")
            return
        self._warn("refused a connection")
        error = TrackwayError(
            ErrorCode.OVERLOADED,
            f"expected fewer than {self.max_connections} active connections on this process; retry later, or "
            "raise max_connections and the limit of open files",
        )
        self._refuse(error.status, error)

    def _warn(self, what: str) -> None:
        kind = type(self)
        if time.monotonic() - kind.warned_at >= _WARN_EVERY_S:
            kind.warned_at = time.monotonic()
            logger.warning("more than %d connections: %s (logged once a minute)", self.max_connections, what)

    def _refuse(self, status: int, error: str | TrackwayError) -> None:
        """Send the error unless a response has started, and close."""
        self._forget()
        if not self._in_work:
            if isinstance(error, str):
                error = TrackwayError(ErrorCode.INVALID_REQUEST, error)
            headers = {**retry_after(error), "connection": "close"}
            response = JSONResponse(error.to_reply().model_dump(mode="json"), status, headers)
            head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
            head += [b"%s: %s" % header for header in response.raw_headers]
            self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()


def bound_server(receive: Receive, settings: ConnectionSettings) -> None:
    """Apply the limits to the uvicorn server of this lifespan, before it listens. Other servers are unchanged."""
    # uvicorn gives an app no access to its server, but the object of this method has its Config.
    config = getattr(getattr(receive, "__self__", None), "config", None)
    if isinstance(config, Config):
        config.http_protocol_class = bounded_protocol(settings, config.http_protocol_class)


def bounded_protocol(
    settings: ConnectionSettings, protocol: type[asyncio.Protocol] = AutoHTTPProtocol
) -> type[asyncio.Protocol]:
    """The protocol class with the limits, for one server. Returned unchanged unless it is uvicorn's HTTP/1.1."""
    if issubclass(protocol, BoundedProtocol) or not issubclass(protocol, (AutoHTTPProtocol, H11Protocol)):
        return protocol
    attributes = {
        "settings": settings,
        "max_connections": min(settings.max_connections, _connections_by_files()),
        "held": set(),
        "waiting": {},
    }
    return type(f"Bounded{protocol.__name__}", (BoundedProtocol, protocol), attributes)


def _connections_by_files() -> int:
    """Three quarters of the files that this process may still open. The rest is for its own work."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(1, (limit - len(os.listdir("/dev/fd"))) * 3 // 4)
