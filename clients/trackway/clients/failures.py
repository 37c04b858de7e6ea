"""Classification of failed attempts: the error, whether a retry can succeed, and the incident to record."""

import math

import httpx
from pydantic import ValidationError

from trackway.clients.http_client import WholeResponse
from trackway.clients.token import TOKEN
from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.trajectory import Incident

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


def is_backpressure(error: BaseException | None) -> bool:
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
        and not is_backpressure(error)
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
