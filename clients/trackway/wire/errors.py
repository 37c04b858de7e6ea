"""Every error that crosses a process: its code, its HTTP status, and whether a retry can succeed.

A non-2xx body of ours is always `{"error": {"code", "message", "retryable", "detail"}}`. A 5xx without such a body was
not made by us (Ray Serve answers plain text when a replica dies), and is therefore retried.

TrackwayError            one class, raised on both sides of the wire: services raise it, clients raise it again
  .code                  a member of ErrorCode; ERRORS gives status and retryable
"""

import json
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, named_number
from trackway.wire.text import well_formed

MAX_MESSAGE_CHARS = 4096
"""Longest message of an error; a longer one, which quotes what came, loses its middle."""
MAX_DETAIL_BYTES = 8192
"""Longest detail of an error as JSON; long texts are shortened, and values beyond it left out."""
_SHORT_CHARS = 256


class ErrorCode(StrEnum):
    """The closed list of codes; a client may match on them."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    UNKNOWN_TOOL = "unknown_tool"
    UNKNOWN_AGENT = "unknown_agent"
    UNKNOWN_DATA_SOURCE = "unknown_data_source"
    INSTANCE_NOT_FOUND = "instance_not_found"
    INSTANCE_LOST = "instance_lost"
    CONFLICT = "conflict"
    WEIGHTS_BEHIND = "weights_behind"
    REQUEST_INCOMPLETE = "request_incomplete"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    OVERLOADED = "overloaded"
    PAUSED = "paused"
    TOOL_FAILED = "tool_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ENGINE_FAILED = "engine_failed"
    WEIGHTS_CORRUPT = "weights_corrupt"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    WEIGHTS_STALE = "weights_stale"
    NOT_FINITE = "not_finite"
    DISK_FULL = "disk_full"
    NOT_WRITABLE = "not_writable"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class ErrorSpec(NamedTuple):
    """The HTTP status of a code, whether the same request may succeed later, and what the code means."""

    status: int
    retryable: bool
    meaning: str


ERRORS: dict[ErrorCode, ErrorSpec] = {
    ErrorCode.INVALID_REQUEST: ErrorSpec(
        422, False, "The request does not fit its schema, or a value in it cannot be used."
    ),
    ErrorCode.UNAUTHORIZED: ErrorSpec(
        401, False, "The service expects a bearer token that it knows, and got none or another one."
    ),
    ErrorCode.FORBIDDEN: ErrorSpec(403, False, "The token is known but lacks the scope that the route needs."),
    ErrorCode.NOT_FOUND: ErrorSpec(404, False, "There is no such route, run or file."),
    ErrorCode.MODEL_NOT_FOUND: ErrorSpec(404, False, "The rollout service serves another model than the one named."),
    ErrorCode.UNKNOWN_TOOL: ErrorSpec(404, False, "The tool server offers no tool of that name."),
    ErrorCode.UNKNOWN_AGENT: ErrorSpec(404, False, "The agent service has no agent loop of that name."),
    ErrorCode.UNKNOWN_DATA_SOURCE: ErrorSpec(422, False, "The reward service has no scorer for that data source."),
    ErrorCode.INSTANCE_NOT_FOUND: ErrorSpec(
        404, False, "The tool instance was never created on this replica, or has been released."
    ),
    ErrorCode.INSTANCE_LOST: ErrorSpec(
        410, False, "The tool instance existed and its state is gone; create another one."
    ),
    ErrorCode.CONFLICT: ErrorSpec(
        409,
        False,
        "The request contradicts the current state, such as a second active run or a reused idempotency key.",
    ),
    ErrorCode.WEIGHTS_BEHIND: ErrorSpec(409, True, "The replica does not hold the requested weight version yet."),
    ErrorCode.REQUEST_INCOMPLETE: ErrorSpec(
        408, True, "The header or the body stopped coming: the connection broke, or its sender was too slow."
    ),
    ErrorCode.PAYLOAD_TOO_LARGE: ErrorSpec(413, False, "The request is over a limit in bytes or JSON items."),
    ErrorCode.OVERLOADED: ErrorSpec(429, True, "The queue is full; `Retry-After` says when to ask again."),
    ErrorCode.PAUSED: ErrorSpec(503, True, "The engine is paused, as during a weight update or while it sleeps."),
    ErrorCode.TOOL_FAILED: ErrorSpec(
        500, False, "The tool raised an exception, or its remote server refused the call."
    ),
    ErrorCode.DEADLINE_EXCEEDED: ErrorSpec(
        504, False, "The time limit of the call, or the caller's own deadline, has passed."
    ),
    ErrorCode.ENGINE_FAILED: ErrorSpec(500, False, "The inference engine failed or answered something unusable."),
    ErrorCode.WEIGHTS_CORRUPT: ErrorSpec(
        500, False, "Published weights are incomplete, damaged, or not what the engine shows after loading them."
    ),
    ErrorCode.CHECKPOINT_CORRUPT: ErrorSpec(
        500, False, "A file of the checkpoint differs from its digest or cannot be read."
    ),
    ErrorCode.WEIGHTS_STALE: ErrorSpec(
        500, False, "After a load the engine still answers with an earlier weight version."
    ),
    ErrorCode.NOT_FINITE: ErrorSpec(
        500, False, "A reward, a logprob or a weight is NaN, infinite, or too large for float32."
    ),
    ErrorCode.DISK_FULL: ErrorSpec(507, False, "No room is left on the storage, or a quota is used up."),
    ErrorCode.NOT_WRITABLE: ErrorSpec(507, False, "The storage is read-only, broken, or not writable for this user."),
    ErrorCode.UNAVAILABLE: ErrorSpec(
        503, True, "The service, or one that it depends on, is starting, stopping or does not answer."
    ),
    ErrorCode.INTERNAL: ErrorSpec(500, False, "An unexpected exception; the service's log has it."),
}


class ErrorBody(WireReply):
    """What went wrong: expected, got, remedy."""

    code: ErrorCode
    message: str
    retryable: bool
    detail: dict[str, JsonValue] = Field(default_factory=dict)


class ErrorReply(WireReply):
    """The body of every non-2xx answer."""

    error: ErrorBody


class TrackwayError(Exception):
    """An error with a code; the message says what was expected, what came, and the remedy."""

    def __init__(self, code: ErrorCode, message: str, **detail: JsonValue) -> None:
        self.message = well_formed(shortened(message, MAX_MESSAGE_CHARS))
        super().__init__(self.message)
        self.code = code
        self.detail = _bounded(detail)

    @property
    def status(self) -> int:
        """HTTP status of the code."""
        return ERRORS[self.code].status

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return ERRORS[self.code].retryable

    def to_reply(self) -> ErrorReply:
        """The wire form of this error."""
        detail = {key: _in_json(value) for key, value in self.detail.items()}
        body = ErrorBody(code=self.code, message=self.message, retryable=self.retryable, detail=detail)
        return ErrorReply(error=body)

    @classmethod
    def from_reply(cls, reply: ErrorReply) -> "TrackwayError":
        """The error that a service answered with, to be raised on the client's side."""
        return cls(reply.error.code, reply.error.message, **reply.error.detail)


def _in_json(value: JsonValue) -> JsonValue:
    if isinstance(value, float):
        return named_number(value)
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    return [_in_json(item) for item in value] if isinstance(value, list) else value


def shortened(text: str, limit: int) -> str:
    """`text`, with its middle replaced by a marker where it has more than `limit` characters (at least 64)."""
    if len(text) <= limit:
        return text
    kept = limit - 40
    tail = kept // 4
    marker = f"[...{len(text) - kept} characters...]"
    return f"{text[: kept - tail]}{marker}{text[-tail:]}"


def _bounded(detail: dict[str, JsonValue]) -> dict[str, JsonValue]:
    bounded: dict[str, JsonValue] = {}
    left = MAX_DETAIL_BYTES
    for name, value in detail.items():
        if isinstance(value, str):
            value = well_formed(shortened(value, _SHORT_CHARS))
        size = len(json.dumps(value)) if isinstance(value, str | list | dict) else 0
        if size <= left:
            bounded[name] = value
            left -= size
    return bounded
