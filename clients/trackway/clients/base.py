"""How a service is called: one client factory, one retry policy, one place that turns answers into errors.

Every call has a deadline, which is passed on as `x-request-deadline`; every POST has an `Idempotency-Key`, so that
asking again is safe. Retried are failures of the transport, errors whose code says retryable, and answers of Ray Serve
itself: 5xx when a replica dies, 404 while its proxy has no routes yet. How often and how soon is in patience.py. A
retry is an incident: an event on the current span, and in the ledger. The bearer token is that of TRACKWAY_TOKEN unless
one is given; redirects are not followed, so that it goes to no other host.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, SecretStr, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from trackway.clients.failures import ForeignServerError, error_of, incident_of, reason_of, worth_retrying
from trackway.clients.patience import RetryState
from trackway.clients.shared_http import shared_http
from trackway.clients.token import authorization, token_or_environments
from trackway.tracing import add_incident, current_trace_stats, inject
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.headers import IDEMPOTENCY_KEY, REQUEST_DEADLINE, SESSION_ID, TRACE_RECEIPT, header_text

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Deadline:
    """The time at which a caller gives up; Unix time, so that it can be sent to other processes."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The moment `seconds` from now."""
        return cls(time.time() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.time())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.remaining == 0.0

    def earlier(self, seconds: float) -> "Deadline":
        """This deadline, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.time() + seconds))


@dataclass(frozen=True)
class CallPolicy:
    """Bounds of one logical call, its retries included."""

    connect_s: float = 5.0
    """Time limit for opening a connection."""
    read_s: float = 120.0
    """Time limit for the next bytes of an answer."""
    total_s: float = 300.0
    """Time limit of the whole call when the caller gives no deadline."""
    attempts: int = 5
    """Attempts of one call, the first included; a 429 answer does not count."""
    outage_s: float = 0.0
    """Seconds during which attempts that reach no service do not count: nothing listens, or Serve has no replica."""
    backoff_s: float = 0.2
    """First pause before a retry; doubled each time, with full jitter."""
    max_backoff_s: float = 5.0
    """Longest pause before a retry."""
    max_in_flight: int = 256
    """Concurrent requests of one client; others wait in the client until their deadline."""


class ServiceClient:
    """Calls one service by base URL; subclasses name its routes."""

    def __init__(
        self,
        base_url: str,
        http: httpx.AsyncClient | None = None,
        policy: CallPolicy | None = None,
        token: SecretStr | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._token = token_or_environments(token)
        self.policy = policy or CallPolicy()
        self._http = http
        self._slots = asyncio.Semaphore(self.policy.max_in_flight)

    @property
    def http(self) -> httpx.AsyncClient:
        """The client given, or the process's shared one."""
        return self._http or shared_http()

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
    ) -> M:
        """Send one request, with retries where they can help, and parse the answer.

        Raises:
            TrackwayError: the service's own error; `unavailable` when every try failed on the way; `deadline_exceeded`.
        """
        response = await self.send(
            method, path, body=body, session_id=session_id, idempotency_key=idempotency_key, deadline=deadline
        )
        try:
            return reply.model_validate_json(response.content)
        except ValidationError as error:
            message = f"{method} {self.base_url}{path}: the answer is no {reply.__name__}: {error}"
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
    ) -> httpx.Response:
        """As `call`, without parsing the answer."""
        deadline = deadline or Deadline.after(self.policy.total_s)
        key = idempotency_key or (uuid.uuid4().hex if method == "POST" else None)
        content = None if body is None else body.model_dump_json().encode()
        try:
            async with asyncio.timeout(deadline.remaining):
                async for attempt in self._retrying(path, deadline):
                    with attempt:
                        headers = self._headers(session_id, key, deadline)
                        return await self._once(method, path, content, headers, deadline)
        except TimeoutError as error:
            message = (
                f"{method} {self.base_url}{path}: no answer before the deadline; allow more time or look at /ready"
            )
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        except (httpx.TransportError, ForeignServerError) as error:
            raise self._unavailable(method, path, error) from error
        raise AssertionError("tenacity returns or raises")

    async def _once(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str], deadline: Deadline
    ) -> httpx.Response:
        async with self._slots:
            response = await self._exchange(self.base_url, method, path, content, headers, deadline)
        _take_receipt(response)
        if not response.is_success:
            raise error_of(response)
        return response

    async def _exchange(
        self, base_url: str, method: str, path: str, content: bytes | None, headers: dict[str, str], deadline: Deadline
    ) -> httpx.Response:
        """One request and its answer, whatever it says."""
        return await self.http.request(
            method,
            base_url + path,
            content=content,
            headers=headers,
            timeout=self._timeout(deadline),
            follow_redirects=False,
        )

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, body: BaseModel | None = None, deadline: Deadline | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a streamed answer; not retried, since the caller knows which lines it still wants.

        Raises:
            TrackwayError: the service's own error; `unavailable` when the stream breaks; `deadline_exceeded`.
        """
        deadline = deadline or Deadline.after(self.policy.total_s)
        content = None if body is None else body.model_dump_json().encode()
        headers = self._headers(None, None, deadline)
        try:
            async with (
                asyncio.timeout(deadline.remaining),
                self._slots,
                self.http.stream(
                    method,
                    self.base_url + path,
                    content=content,
                    headers=headers,
                    timeout=self._timeout(deadline),
                    follow_redirects=False,
                ) as response,
            ):
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                yield response.aiter_lines()
        except TimeoutError as error:
            message = f"{method} {self.base_url}{path}: the stream did not end before the deadline; allow more time"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        except (httpx.TransportError, ForeignServerError) as error:
            raise self._unavailable(method, path, error) from error

    def _headers(self, session_id: str | None, key: str | None, deadline: Deadline) -> dict[str, str]:
        given: Mapping[str, str | None] = {
            "content-type": "application/json",
            SESSION_ID: None if session_id is None else header_text(session_id),
            IDEMPOTENCY_KEY: None if key is None else header_text(key),
            REQUEST_DEADLINE: f"{deadline.at:.3f}",
        }
        headers = {name: value for name, value in given.items() if value is not None} | authorization(self._token)
        inject(headers)
        return headers

    def _timeout(self, deadline: Deadline) -> httpx.Timeout:
        read = max(0.001, min(self.policy.read_s, deadline.remaining))
        return httpx.Timeout(read, connect=min(self.policy.connect_s, read), pool=read)

    def _retrying(self, path: str, deadline: Deadline) -> AsyncRetrying:
        policy = self.policy
        patience = RetryState(
            policy.attempts, policy.backoff_s, policy.max_backoff_s, deadline.remaining, policy.outage_s
        )
        return AsyncRetrying(
            stop=patience.stop,
            wait=patience.wait,
            retry=retry_if_exception(worth_retrying),
            before_sleep=partial(self._tell, self.base_url + path),
            reraise=True,
        )

    def _tell(self, url: str, state: RetryCallState) -> None:
        """Say it after the tries 1, 2, 4, 8, ...: a call that is put off for long must not fill its span."""
        error = state.outcome.exception() if state.outcome else None
        if state.attempt_number.bit_count() == 1:
            add_incident(incident_of(error), url=url, attempt=state.attempt_number, reason=reason_of(error))

    def _unavailable(self, method: str, path: str, error: Exception) -> TrackwayError:
        if isinstance(error, ForeignServerError) and error.status == 429:
            message = f"{method} {self.base_url}{path}: refused until the deadline for lack of room ({error})"
            return TrackwayError(ErrorCode.OVERLOADED, f"{message}; allow more time or add replicas")
        message = (
            f"{method} {self.base_url}{path}: no answer after {self.policy.attempts} tries "
            f"({type(error).__name__}: {error}); is the service up? `trackway status` says"
        )
        return TrackwayError(ErrorCode.UNAVAILABLE, message)


def _take_receipt(response: httpx.Response) -> None:
    """What the service added to the trace counts for the trajectory that called it."""
    opened = current_trace_stats()
    receipt = response.headers.get(TRACE_RECEIPT)
    if opened is not None and receipt is not None:
        opened.add_receipt(receipt)
