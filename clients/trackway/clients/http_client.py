"""The process's shared HTTP client, the bearer token of its calls, and `run` for programs that use it."""

import asyncio
import errno
import os
import re
import socket
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar, cast

import httpx
from pydantic import SecretStr

from trackway.system import read_secret
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    import aiohttp
    from httpx_aiohttp import AiohttpTransport


TOKEN = "TRACKWAY_TOKEN"
"""Environment variable with the token for all services."""
TOKEN_FILE = "TRACKWAY_TOKEN_FILE"
"""Environment variable with the path of a file that has the token."""


_given: ContextVar[SecretStr | None] = ContextVar("trackway_token", default=None)


@contextmanager
def using_token(token: SecretStr | None) -> Generator[None]:
    """Send this token in calls of the block's context. None leaves the environment's."""
    before = _given.set(token or _given.get())
    try:
        yield
    finally:
        _given.reset(before)


def resolve_token(explicit: SecretStr | None = None) -> SecretStr | None:
    """The token to send, or None. An empty explicit token means none. Raises TrackwayError for an invalid token."""
    explicit = _given.get() if explicit is None else explicit
    token = (os.environ.get(TOKEN, "") if explicit is None else explicit.get_secret_value()).strip()
    path = os.environ.get(TOKEN_FILE)
    if path and not token and explicit is None:
        return SecretStr(_checked(_content(Path(path)), f"{TOKEN_FILE} {path}"))
    return SecretStr(_checked(token, TOKEN)) if token else None


def authorization(token: SecretStr | None) -> dict[str, str]:
    """The request header that carries the token."""
    return {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}


def _content(file: Path) -> str:
    try:
        token = read_secret(file, TOKEN_FILE).decode(errors="replace").strip()
    except OSError as error:
        message = f"{TOKEN_FILE} {file}: {error.strerror}; set it to a file that this process can read"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message) from error
    if not token:
        message = f"{TOKEN_FILE} {file}: expected a token, got nothing; write the token into it"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
    return token


def _checked(token: str, source: str) -> str:
    if re.fullmatch(r"[!-~]+", token) is None:
        message = f"{source}: expected printable ASCII without spaces, got other characters; copy the token again"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
    return token


T = TypeVar("T")
_AddrInfo = tuple[int, int, int, str, tuple[object, ...]]
"""Family, kind, protocol, canonical name and address, as from `socket.getaddrinfo`."""

_SILENCE_S = 120.0
_GONE_S = 20
"""Seconds without acknowledgement from the other machine after which a connection breaks. A slow service does not break
it, unless it stops reading a body larger than both socket buffers, a few megabytes."""
_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": _GONE_S * 1000}
"""Socket options of each connection, where the system has them. The last bounds the total and exists on Linux only."""

_shared: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = weakref.WeakKeyDictionary()


async def text_lines(response: httpx.Response) -> AsyncGenerator[str]:
    """The lines of a streamed body, split at line feeds alone.

    `aiter_lines` also splits at U+0085, U+2028 and U+2029, which JSON text may have.
    """
    read = bytearray()
    async for chunk in response.aiter_bytes():
        searched = len(read)
        read += chunk
        while (end := read.find(b"\n", searched)) >= 0:
            yield read[:end].decode(errors="replace").removesuffix("\r")
            del read[: end + 1]
            searched = 0
    if read:
        yield read.decode(errors="replace")


@dataclass(frozen=True)
class WholeResponse:
    """A response whose body has been read."""

    method: str
    url: str
    """URL of the request."""
    status_code: int
    headers: Mapping[str, str]
    """Headers by name, in any case."""
    content: bytes

    @classmethod
    def of(cls, response: httpx.Response) -> "WholeResponse":
        """The same without httpx, whose responses cost more to make than a small call."""
        request = response.request
        return cls(request.method, str(request.url), response.status_code, response.headers, response.content)

    @property
    def is_success(self) -> bool:
        """Return whether the status is 2xx."""
        return 200 <= self.status_code < 300

    @property
    def text(self) -> str:
        """The content, which services send as UTF-8."""
        return self.content.decode(errors="replace")

    async def aclose(self) -> None:
        """Nothing is left to close."""


async def fetch(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    headers: Mapping[str, str],
    content: bytes | None,
    *,
    connect_s: float,
    read_s: float,
) -> WholeResponse:
    """The response to one request, without redirects. Raises httpx.TransportError."""
    if isinstance(http, _PlainClient):
        return await http.fetch(method, normal_url(url), headers, content, connect_s, read_s)
    timeout = httpx.Timeout(read_s, connect=connect_s)
    request = httpx.Request(method, url, content=content, headers=headers, extensions={"timeout": timeout.as_dict()})
    return WholeResponse.of(await http.send(request, follow_redirects=False))


@lru_cache(maxsize=1024)
def normal_url(url: str) -> str:
    """The URL as httpx writes it."""
    return str(httpx.URL(url))


def shared_http() -> httpx.AsyncClient:
    """The process's HTTP client (one per event loop). Timeouts are given per request.

    aiohttp's transport: httpx's own pool costs O(n^2) in connections, 12 ms of CPU a request at 96 in flight.
    """
    loop = asyncio.get_running_loop()
    client = _shared.get(loop)
    if client is None or client.is_closed:
        from httpx_aiohttp import AiohttpTransport  # late, with aiohttp: a third of the time to import the clients

        _correct_errors()
        tls = httpx.create_ssl_context()
        session = _session(tls)
        client = _shared[loop] = _PlainClient(session, AiohttpTransport(verify=tls, client=session))
    return client


class _PlainClient(httpx.AsyncClient):
    """Hands requests to aiohttp as they are: no redirects, cookies or authentication, nor httpx's streams.

    That saves CPU in small calls.
    """

    def __init__(self, session: "aiohttp.ClientSession", transport: "AiohttpTransport") -> None:
        super().__init__(transport=transport, timeout=_SILENCE_S)
        self._plain_session, self._plain_transport = session, transport

    async def send(self, request: httpx.Request, *, stream: bool = False, **_: object) -> httpx.Response:
        """The response, read to its end unless `stream` is set. Raises httpx.TransportError."""
        self._check_open()
        try:
            response = await self._plain_transport.handle_async_request(request)
        except httpx.ConnectError as error:
            raise _with_refusal(error) from error.__cause__
        if not stream:
            response.request = request
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response

    async def fetch(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        connect_s: float,
        read_s: float,
    ) -> WholeResponse:
        """Do `fetch` without httpx's requests and responses."""
        self._check_open()
        timeout = _timeout(connect_s, read_s)
        try:
            async with self._plain_session.request(
                method, url, headers=headers, data=content or None, allow_redirects=False, timeout=timeout
            ) as answer:
                return WholeResponse(method, url, answer.status, answer.headers, await answer.read())
        except Exception:
            from httpx_aiohttp.transport import map_aiohttp_exceptions

            try:
                with map_aiohttp_exceptions():
                    raise
            except httpx.ConnectError as error:
                raise _with_refusal(error) from error.__cause__

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("expected an open HTTP client, got one that is closed")


def _correct_errors() -> None:
    """Let httpx-aiohttp tell apart a connection that was refused, one that broke, and one that took too long.

    It makes a ConnectTimeout of each.
    """
    import aiohttp
    from httpx_aiohttp.transport import AIOHTTP_EXC_MAP  # pyright: ignore[reportUnknownVariableType]

    AIOHTTP_EXC_MAP[aiohttp.ClientConnectionError] = httpx.NetworkError
    AIOHTTP_EXC_MAP[aiohttp.ConnectionTimeoutError] = httpx.ConnectTimeout


def _with_refusal(error: httpx.ConnectError) -> httpx.ConnectError:
    """The error, which names the address that refused a connection. aiohttp says only that it cannot connect."""
    import aiohttp

    cause = error.__cause__
    if isinstance(cause, aiohttp.ClientConnectorError) and cause.os_error.errno == errno.ECONNREFUSED:
        return httpx.ConnectError(f"connection refused at {cause.host}:{cause.port}")
    return error


@lru_cache(maxsize=1024)
def _timeout(connect_s: float, read_s: float) -> "aiohttp.ClientTimeout":
    from aiohttp import ClientTimeout

    return ClientTimeout(sock_connect=connect_s, sock_read=read_s, connect=read_s)


def _session(tls: ssl.SSLContext) -> "aiohttp.ClientSession":
    import aiohttp

    connector = aiohttp.TCPConnector(limit=512, keepalive_timeout=5.0, ssl=tls, socket_factory=_watched)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _watched(address: _AddrInfo) -> socket.socket:
    """A socket with keepalive, which detects a lost machine or a cut link."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


async def close_shared_http() -> None:
    """Close this event loop's shared client. A later call creates a new one."""
    client = _shared.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


def run(work: Coroutine[object, object, T]) -> T:
    """Do `asyncio.run`, and close the shared HTTP client at the end.

    In a thread with a running event loop, such as a notebook's, another thread does it.
    """

    async def main() -> T:
        try:
            return await work
        finally:
            await close_shared_http()

    return _run_beside(main()) if _is_in_a_loop() else asyncio.run(main())


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_WAIT_S = 0.5
"""Longest part of a wait. Python sees a signal that came just before a wait only when that ends."""


def _run_beside(work: Coroutine[object, object, T]) -> T:
    """Do `asyncio.run` in a thread with this context. Ctrl-C cancels the work, and is raised once that has ended."""
    # An interrupt can break the locks of a Condition or a Future, but not these queues.
    begin, ended = SimpleQueue[None](), SimpleQueue[None]()
    tasks: list[asyncio.Task[T]] = []
    results: list[Future[T]] = []

    async def main() -> T:
        tasks.append(cast("asyncio.Task[T]", asyncio.current_task()))
        return await work

    def work_in_thread() -> None:
        begin.get()
        result: Future[T] = Future()
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:
            result.set_exception(error)
        results.append(result)
        ended.put(None)

    def wait() -> None:
        while not results:
            with suppress(Empty):
                ended.get(timeout=_WAIT_S)

    Thread(target=copy_context().run, args=[work_in_thread], name="trackway-run", daemon=True).start()
    try:
        begin.put(None)
        wait()
    except KeyboardInterrupt:
        begin.put(None)  # the interrupt may have come earlier
        while not (tasks or results):
            time.sleep(0.01)
        for task in tasks:
            with suppress(RuntimeError):  # its loop has ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        wait()
        raise
    return results[0].result()
