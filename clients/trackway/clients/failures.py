"""What a failed try means: an error of ours or somebody else's, worth another try or not, and which incident it is."""

import httpx
from pydantic import ValidationError

from trackway.wire.errors import ErrorCode, ErrorReply, TrackwayError
from trackway.wire.tracing import Incident


class NotOurs(Exception):
    """A 5xx, or a 408, that no service of ours made."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


def worth_retrying(error: BaseException) -> bool:
    """Whether the same request may succeed when it is sent again."""
    if isinstance(error, TrackwayError):
        return error.retryable
    return isinstance(error, httpx.TransportError | NotOurs)


def incident_of(error: BaseException | None) -> Incident:
    """What a try that failed says about the service: its process went away, it lacks weights, or it could not just now.

    A silence is no sign of a process that died, so a timeout is a plain retry.
    """
    if isinstance(error, TrackwayError):
        return Incident.WEIGHTS_BEHIND if error.code is ErrorCode.WEIGHTS_BEHIND else Incident.RETRIED
    broken = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.TimeoutException)
    died = isinstance(error, NotOurs) and error.status >= 500
    return Incident.REPLICA_LOST if broken or died else Incident.RETRIED


def reason_of(error: BaseException | None) -> str:
    """The error in one line, its code or kind first."""
    if isinstance(error, NotOurs):
        return str(error)
    kind = error.code.value if isinstance(error, TrackwayError) else type(error).__name__
    return f"{kind}: {error}"


def error_of(response: httpx.Response) -> Exception:
    """The error that a non-2xx answer means."""
    try:
        return TrackwayError.from_reply(ErrorReply.model_validate_json(response.content))
    except ValidationError:
        text = response.text[:200]
    if response.status_code >= 500 or response.status_code == 408:
        return NotOurs(response.status_code, text)
    request = response.request
    message = f"{request.method} {request.url}: HTTP {response.status_code}: {text}; is this a Trackway service?"
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)
