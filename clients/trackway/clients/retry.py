"""Deadlines of calls, classification of failed attempts, and when a call is tried again.

A deadline is the time at which a caller stops waiting. Other processes get the seconds that are left, since clocks of
machines differ. The monotonic clock stands still while a machine is suspended.

Failures are retried a fixed number of times. Attempts that reach no service, for example while Ray Serve's proxy
restarts, do not count for up to `outage_s` seconds. Backpressure (429, or any error with `Retry-After`) is limited by
the call's deadline instead of a number of attempts: each pause is at least as long as the service asked for, and the
call fails with that answer if the next attempt would come after the deadline, or so shortly before it that it would be
cut off.
"""

import math
import random
import time
from dataclasses import dataclass
from typing import Self

import httpx
from pydantic import ValidationError
from tenacity import RetryCallState, wait_random_exponential

from trackway.clients.http_client import TOKEN, WholeResponse
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.trajectory import Incident


@dataclass(frozen=True)
class Deadline:
    """The time at which a caller stops waiting, by this process's `time.monotonic`."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The moment `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Return whether the moment has passed."""
        return self.remaining == 0.0

    def earlier(self, seconds: float) -> "Deadline":
        """This deadline, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds))


_REFUSED = {401: ErrorCode.UNAUTHORIZED, 403: ErrorCode.FORBIDDEN}


_NO_SUCH_ROUTE = "/-/routes"
"""Ray Serve's own 404 names this path of its proxy."""


class ForeignServerError(Exception):
    """A 5xx, 408 or 429 that does not come from a Trackway service, or a 404 of Serve's proxy."""

    def __init__(self, status: int, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.retry_after_s = retry_after_s


def worth_retrying(error: BaseException) -> bool:
    """Return whether the same request may succeed on a retry."""
    if isinstance(error, TrackwayError):
        return error.retryable
    return isinstance(error, httpx.TransportError | ForeignServerError)


def unreached(error: BaseException | None) -> bool:
    """Return whether the request reached no service: nothing listens, or Serve's proxy has no route or replica for
    it."""
    if isinstance(error, ForeignServerError):
        return error.status in (404, 503)
    return unsent(error)


def unsent(error: BaseException | None) -> bool:
    """Return whether no connection was made, so that the service has seen nothing of the request."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def retry_after_of(error: BaseException | None) -> float | None:
    """Seconds after which the service asks for a retry, or None when it does not say."""
    if isinstance(error, ForeignServerError):
        return error.retry_after_s
    asked = error.detail.get("retry_after_s") if isinstance(error, TrackwayError) else None
    return float(asked) if isinstance(asked, int | float) and 0 <= asked < math.inf else None  # False for NaN


def _is_backpressure(error: BaseException | None) -> bool:
    """Return whether the service answered that the call should be retried later, because it is full or busy."""
    full = isinstance(error, ForeignServerError) and error.status == 429
    full = full or (isinstance(error, TrackwayError) and error.code is ErrorCode.OVERLOADED)
    return full or retry_after_of(error) is not None


def incident_of(error: BaseException | None) -> Incident:
    """The incident of a failed attempt: a lost replica, missing weights, or a plain retry.

    A timeout does not show that a process died, so it counts as a plain retry.
    """
    if isinstance(error, TrackwayError):
        return Incident.WEIGHTS_BEHIND if error.code is ErrorCode.WEIGHTS_BEHIND else Incident.RETRIED
    broken = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.TimeoutException)
    died = (
        isinstance(error, ForeignServerError)
        and (error.status >= 500 or error.status == 404)
        and not _is_backpressure(error)
    )
    return Incident.REPLICA_LOST if broken or died else Incident.RETRIED


def reason_of(error: BaseException | None) -> str:
    """The error as one line that begins with its code or type."""
    if isinstance(error, ForeignServerError):
        return str(error)
    kind = error.code.value if isinstance(error, TrackwayError) else type(error).__name__
    return f"{kind}: {error}"


def error_of(response: WholeResponse) -> Exception:
    """The error for a non-2xx answer."""
    try:
        ours = TrackwayError.from_reply(ErrorReply.model_validate_json(response.content))
    except ValidationError:
        text = response.text[:200]
    else:
        return _with_remedy(response, ours) if response.status_code in _REFUSED else ours
    # A new Serve proxy listens before it has its routes.
    without_routes = response.status_code == 404 and _NO_SUCH_ROUTE in text
    if response.status_code >= 500 or response.status_code in (408, 429) or without_routes:
        return ForeignServerError(response.status_code, text, _retry_after(response))
    if response.status_code in _REFUSED:
        return _with_remedy(response, TrackwayError(_REFUSED[response.status_code], text))
    message = f"{response.method} {response.url}: HTTP {response.status_code}: {text}; is this a Trackway service?"
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)


def _with_remedy(response: WholeResponse, error: TrackwayError) -> TrackwayError:
    message = f"{response.method} {response.url}: {error.message} (set the token in {TOKEN})"
    return TrackwayError(error.code, message, **error.detail)


def _retry_after(response: WholeResponse) -> float | None:
    """The Retry-After header in seconds, or None for its date form."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() and len(value) < 8 else None


_LAST_ATTEMPT_S = 1.0
"""Time that an attempt after a refusal must have. A fifth of the call's time if that is less."""


class RetryState:
    """The attempts and the time that one call has left. Tenacity calls `wait` before `stop`."""

    def __init__(
        self, attempts: int, backoff_s: float, max_backoff_s: float, deadline_s: float, outage_s: float = 0.0
    ) -> None:
        self._failures_left = attempts
        self._least_s = backoff_s
        self._backoff = wait_random_exponential(backoff_s, max_backoff_s)
        self._time_left_s = deadline_s - min(_LAST_ATTEMPT_S, deadline_s / 5)
        self._outage_s = outage_s
        self._unreached_since: float | None = None

    def wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: 1 to 1.5 times the requested pause, so that refused clients spread out."""
        asked_s = retry_after_of(_error(state))
        if asked_s is None:
            return self._backoff(state)
        return max(asked_s, self._least_s) * random.uniform(1.0, 1.5)

    def stop(self, state: RetryCallState) -> bool:
        """Return whether no attempts are left, or the requested pause leaves no time for another one."""
        if _is_backpressure(_error(state)):
            elapsed_s = state.seconds_since_start or 0.0
            return elapsed_s + state.upcoming_sleep >= self._time_left_s
        if self._is_outage(state):
            return False
        self._failures_left -= 1
        return self._failures_left <= 0

    def _is_outage(self, state: RetryCallState) -> bool:
        """Return whether the service has been unreachable, for less than `outage_s` seconds so far."""
        if not unreached(_error(state)):
            self._unreached_since = None
            return False
        now_s = state.seconds_since_start or 0.0
        if self._unreached_since is None:
            self._unreached_since = now_s
        return now_s - self._unreached_since < self._outage_s


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
