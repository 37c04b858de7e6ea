"""Base of the service clients: requests with deadlines, retries, and conversion of answers into errors.

Every call has a deadline, sent as `x-request-timeout`. Every POST has an `Idempotency-Key`, which makes retries safe.
Calls are retried after transport failures, after errors whose code is retryable, and after answers of Ray Serve itself:
5xx when a replica dies, 404 while its proxy has no routes yet. retry.py decides when. Each retry is recorded as an
incident, on the current span and in the trace stats. With `direct`, calls go to the replicas' own addresses where these
can be reached, else through Serve's proxy (direct.py). The bearer token comes from TRACKWAY_TOKEN unless one is passed;
redirects are not followed, so that the token reaches no other host.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Self, TypeVar

import httpx
from pydantic import BaseModel, SecretStr, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from trackway.clients.batches import Batches
from trackway.clients.direct import Address, DirectRoutes, Headers, R
from trackway.clients.http_client import (
    WholeResponse,
    authorization,
    fetch,
    normal_url,
    resolve_token,
    shared_http,
    text_lines,
)
from trackway.clients.retry import (
    Deadline,
    ForeignServerError,
    RetryState,
    error_of,
    incident_of,
    reason_of,
    worth_retrying,
)
from trackway.system.waits import note_problem
from trackway.tracing import add_incident, current_trace_stats, inject
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import WeightsReply
from trackway.wire.service import (
    IDEMPOTENCY_KEY,
    REQUEST_TIMEOUT,
    SESSION_ID,
    TRACE_RECEIPT,
    BatchRequest,
    Health,
    Ready,
    ReplicaInfo,
    ReplicaList,
    ReplyT,
    RequestT,
    ServiceName,
    header_text,
)

M = TypeVar("M", bound=BaseModel)

_ASK_S = 10.0
"""Longest wait for the list of a service's replicas."""


@dataclass(frozen=True)
class CallPolicy:
    """Bounds of one logical call, its retries included."""

    connect_s: float = 5.0
    """Seconds to open a connection."""
    read_s: float = 120.0
    """Seconds to wait for the next bytes of an answer."""
    total_s: float = 300.0
    """Seconds for the whole call when the caller sets no deadline."""
    attempts: int = 5
    """Attempts of one call, the first included. A 429 answer does not count."""
    outage_s: float = 0.0
    """Seconds during which attempts that reach no service (nothing listens, or Serve has no replica) do not count."""
    backoff_s: float = 0.2
    """First pause before a retry; doubled each time, with full jitter."""
    max_backoff_s: float = 5.0
    """Longest pause before a retry."""
    max_in_flight: int = 256
    """Concurrent requests of one client. Others wait in the client until their deadline."""

    @classmethod
    def question(cls, total_s: float, attempts: int = 1) -> Self:
        """The policy of a question to a service about its own state, answered within `total_s` seconds or given up."""
        return cls(connect_s=min(5.0, total_s), read_s=total_s, total_s=total_s, attempts=attempts)


@dataclass(frozen=True)
class _Request:
    """One logical call, which may take several attempts."""

    method: str
    path: str
    content: bytes | None
    deadline: Deadline
    replica: str | None = None
    """Replica to ask first."""
    broken: list[str] = field(default_factory=list[str])
    """Replicas at which attempts broke off."""


class ServiceClient:
    """Client of the service at a base URL. Subclasses add its routes.

    batches: send the generations or scores that are requested for a session at the same moment in one request.
    """

    service: ClassVar[ServiceName | None] = None
    """None for a client of any service."""
    remedy: ClassVar[str] = "check the service with `trackway status`"
    """Remedy that an error names when the service does not answer."""

    def __init__(
        self,
        base_url: str,
        http: httpx.AsyncClient | None = None,
        policy: CallPolicy | None = None,
        token: SecretStr | None = None,
        direct: bool = False,
        batches: bool = False,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._token = resolve_token(token)
        self.policy = policy or CallPolicy()
        self._http = http
        self._slots = asyncio.Semaphore(self.policy.max_in_flight)
        self._routes = DirectRoutes(self.base_url, self._replicas, self._name_at) if direct else None
        self._in_batches = batches

    @property
    def http(self) -> httpx.AsyncClient:
        """The HTTP client passed in, or the process's shared one."""
        return self._http or shared_http()

    @property
    def called(self) -> str:
        """The service, as an incident of a call names it; the host of another's."""
        return self.service or httpx.URL(self.base_url).host

    @property
    def spilled(self) -> int:
        """Calls that a full replica passed on to the next one, since the start."""
        return self._routes.spilled if self._routes else 0

    async def address_of(self, replica: str) -> Address | None:
        """The direct address of one replica of the service, or None when it cannot be reached at one."""
        addresses = await self._routes.addresses(None, replica) if self._routes is not None else []
        return addresses[0] if addresses else None

    async def call(
        self,
        method: str,
        path: str,
        *,
        reply: type[M],
        body: BaseModel | None = None,
        session_id: str | None = None,
        idempotency_key: str | None = None,
        deadline: Deadline | None = None,
        replica: str | None = None,
    ) -> M:
        """Send one request, with retries, and parse the answer. A direct client asks `replica` first.

        Raises:
            TrackwayError: the service's own error; `unavailable` when no attempt got an answer; `deadline_exceeded`.
        """
        response = await self.send(
            method,
            path,
            body=body,
            session_id=session_id,
            idempotency_key=idempotency_key,
            deadline=deadline,
            replica=replica,
        )
        try:
            return reply.model_validate_json(response.content)
        except ValidationError as error:
            message = f"{method} {self.base_url}{path}: the answer is not a valid {reply.__name__}: {error}"
            raise TrackwayError(ErrorCode.INTERNAL, message) from error

    async def send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        session_id: str | None = None,
        idempotency_key: str | None = None,
        deadline: Deadline | None = None,
        replica: str | None = None,
    ) -> WholeResponse:
        """Do `call` without parsing the answer."""
        deadline = deadline or Deadline.after(self.policy.total_s)
        key = idempotency_key or (os.urandom(16).hex() if method == "POST" else None)
        request = _Request(method, path, _content(body), deadline, replica)
        try:
            async with asyncio.timeout(deadline.remaining):
                failed: list[Exception] = []
                try:
                    return await self._once(request, self._headers(session_id, key, deadline))
                except Exception as error:  # only then set up the retries, which takes as long as a small call
                    failed.append(error)
                async for attempt in self._retrying(path, deadline):
                    with attempt:
                        if failed:
                            raise failed.pop()
                        return await self._once(request, self._headers(session_id, key, deadline))
        except TimeoutError as error:
            message = (
                f"{method} {self.base_url}{path}: no answer before the deadline; allow more time or look at /ready"
            )
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        except (httpx.TransportError, ForeignServerError) as error:
            raise self._unavailable(method, path, error) from error
        raise AssertionError("tenacity returns or raises")

    async def _once(self, request: _Request, headers: dict[str, str]) -> WholeResponse:
        async with self._slots:
            response = await self._exchange(self._fetch, request, headers)
        _take_receipt(response)
        if not response.is_success:
            raise self.error_of(response)
        return response

    def error_of(self, response: WholeResponse) -> Exception:
        """The error for a non-2xx answer of a call."""
        error = error_of(response)
        at_root = self.service is not None and httpx.URL(self.base_url).path == "/"
        if at_root and isinstance(error, ForeignServerError) and error.status == 404:
            message = f"expected the address of a service, got {self.base_url}, the root of Ray Serve's proxy"
            return TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; give {self.base_url}/{self.service}")
        return error

    async def _exchange(
        self, send: Callable[[_Request, str, Headers], Awaitable[R]], request: _Request, headers: Headers
    ) -> R:
        """Send one request. Returns the answer with any status."""
        if self._routes is None:
            return await send(request, self.base_url, headers)
        holder = self._holder(request.path)
        return await self._routes.exchange(partial(send, request), headers, holder, request.broken, request.replica)

    async def _fetch(self, request: _Request, base_url: str, headers: Headers) -> WholeResponse:
        connect_s, read_s = self._limits_s(request.deadline)
        url = base_url + request.path
        return await fetch(self.http, request.method, url, headers, request.content, connect_s=connect_s, read_s=read_s)

    async def _open(self, request: _Request, base_url: str, headers: Headers) -> httpx.Response:
        """The answer with its body unread."""
        connect_s, read_s = self._limits_s(request.deadline)
        prepared = httpx.Request(
            request.method,
            normal_url(base_url + request.path),
            content=request.content,
            headers=headers,
            extensions={"timeout": httpx.Timeout(read_s, connect=connect_s).as_dict()},
        )
        return await self.http.send(prepared, stream=True, follow_redirects=False)

    def _batches(
        self, path: str, request: type[RequestT], reply: type[ReplyT], size: Callable[[RequestT], int]
    ) -> Batches[RequestT, ReplyT] | None:
        """Batches for a route, if this client sends any. `size` returns a request's size, as in `Batches`."""

        def open_batch(
            body: BatchRequest[RequestT], session_id: str, deadline: Deadline, replica: str | None
        ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
            return self.stream("POST", path, body=body, session_id=session_id, deadline=deadline, replica=replica)

        url = self.base_url + path
        return Batches(open_batch, url, self.called, request, reply, size) if self._in_batches else None

    def _holder(self, path: str) -> str | None:
        """The only replica that can answer a request, or None."""
        return None

    async def _replicas(self) -> ReplicaList:
        asking = ServiceClient(self.base_url, self._http, CallPolicy.question(_ASK_S), self._token)
        return await asking.call("GET", "/replicas", reply=ReplicaList)

    async def _name_at(self, address: Address) -> str:
        asking = ServiceClient(address.url, self._http, CallPolicy.question(_ASK_S), address.token)
        return (await asking.call("GET", "/health", reply=Health)).replica

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        session_id: str | None = None,
        deadline: Deadline | None = None,
        replica: str | None = None,
    ) -> AsyncGenerator[AsyncIterator[str], None]:
        """The lines of a streamed answer. Not retried, because only the caller knows which lines are missing.

        Raises:
            TrackwayError: the service's own error; `unavailable` when the stream breaks; `deadline_exceeded`.
        """
        deadline = deadline or Deadline.after(self.policy.total_s)
        request = _Request(method, path, _content(body), deadline, replica)
        headers = self._headers(session_id, None, deadline)
        try:
            async with asyncio.timeout(deadline.remaining), self._slots:
                response = await self._exchange(self._open, request, headers)
                async with aclosing(response):
                    if not response.is_success:
                        await response.aread()
                        raise self.error_of(WholeResponse.of(response))
                    yield text_lines(response)
        except TimeoutError as error:
            message = f"{method} {self.base_url}{path}: the stream did not end before the deadline; allow more time"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        except (httpx.TransportError, ForeignServerError) as error:
            raise self._unavailable(method, path, error) from error

    def _headers(self, session_id: str | None, key: str | None, deadline: Deadline) -> dict[str, str]:
        headers = {"content-type": "application/json", REQUEST_TIMEOUT: f"{deadline.remaining:.3f}"}
        if session_id is not None:
            headers[SESSION_ID] = header_text(session_id)
        if key is not None:
            headers[IDEMPOTENCY_KEY] = header_text(key)
        headers |= authorization(self._token)
        inject(headers)
        return headers

    def _limits_s(self, deadline: Deadline) -> tuple[float, float]:
        """Seconds to connect, and to wait for the next bytes or for a connection of the pool."""
        read_s = max(0.001, min(self.policy.read_s, deadline.remaining))
        return min(self.policy.connect_s, read_s), read_s

    def _retrying(self, path: str, deadline: Deadline) -> AsyncRetrying:
        policy = self.policy
        retry_state = RetryState(
            policy.attempts, policy.backoff_s, policy.max_backoff_s, deadline.remaining, policy.outage_s
        )
        return AsyncRetrying(
            stop=retry_state.stop,
            wait=retry_state.wait,
            retry=retry_if_exception(worth_retrying),
            before_sleep=partial(self._record_incident, self.base_url + path),
            reraise=True,
        )

    def _record_incident(self, url: str, state: RetryCallState) -> None:
        """Record attempts 1, 2, 4, 8, ... only, so that a call with many retries does not fill its span."""
        error = state.outcome.exception() if state.outcome else None
        note_problem(reason_of(error))
        if state.attempt_number.bit_count() == 1:
            attempt, reason = state.attempt_number, reason_of(error)
            add_incident(incident_of(error), called=self.called, url=url, attempt=attempt, reason=reason)

    def _unavailable(self, method: str, path: str, error: Exception) -> TrackwayError:
        if isinstance(error, ForeignServerError) and error.status == 429:
            message = (
                f"{method} {self.base_url}{path}: refused until the deadline because the service is full ({error})"
            )
            return TrackwayError(ErrorCode.OVERLOADED, f"{message}; allow more time or add replicas")
        message = (
            f"{method} {self.base_url}{path}: no answer after {self.policy.attempts} attempts "
            f"({type(error).__name__}: {error}); {self.remedy}"
        )
        return TrackwayError(ErrorCode.UNAVAILABLE, message)


def _content(body: BaseModel | None) -> bytes | None:
    return None if body is None else body.model_dump_json().encode()


def _take_receipt(response: WholeResponse) -> None:
    """Add the service's trace stats, sent with the answer, to the current trace stats."""
    stats = current_trace_stats()
    receipt = response.headers.get(TRACE_RECEIPT)
    if stats is not None and receipt is not None:
        stats.add_receipt(receipt)


async def replicas_of(client: ServiceClient) -> ReplicaList:
    """Every replica of the client's service. Raises TrackwayError when it does not answer."""
    try:
        return await client.call("GET", "/replicas", reply=ReplicaList)
    except TrackwayError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
    health = await client.call("GET", "/health", reply=Health)  # a service alone, without Ray Serve
    try:
        ready = await client.call("GET", "/ready", reply=Ready)
    except TrackwayError as error:
        ready = Ready(ready=False, reason=error.message)
    held = health.service == "rollout" and ready.ready
    weights = await client.call("GET", "/weights", reply=WeightsReply) if held else None
    return ReplicaList(replicas=[ReplicaInfo(health=health, ready=ready, weights=weights)])
