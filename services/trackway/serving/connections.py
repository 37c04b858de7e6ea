"""Connection limits of a server: number of connections, and size and time of a request's header.

uvicorn has no such limits: a connection that never completes a header stays open. A subclass of its HTTP protocol adds
them to the server of a service (`bound_server`), at a replica's own port and in Ray Serve's proxy.

A connection *waits* while it has no active request: it is new, idle, or within a header. With too many connections the
longest waiting one is closed, and a new one is refused only if all are active.
"""

import asyncio
import logging
import os
import resource
import time
from http import HTTPStatus
from typing import Any, ClassVar, cast

from starlette.responses import JSONResponse
from starlette.types import Receive
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from trackway.serving.routes import retry_after
from trackway.serving.settings import ConnectionSettings
from trackway.wire.errors import ErrorCode, TrackwayError

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
