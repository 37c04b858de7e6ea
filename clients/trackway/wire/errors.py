"""Every error that crosses a process: its code, its HTTP status, and whether asking again can help.

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
    """A reward, a logprob or a weight is NaN, infinite, or too large for float32."""
    DISK_FULL = "disk_full"
    """No room is left, or a quota is used up."""
    NOT_WRITABLE = "not_writable"
    """The storage is read-only, broken, or not ours to write."""
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class ErrorSpec(NamedTuple):
    """The HTTP status of a code, and whether the same request may succeed later."""

    status: int
    retryable: bool


ERRORS: dict[ErrorCode, ErrorSpec] = {
    ErrorCode.INVALID_REQUEST: ErrorSpec(422, False),
    ErrorCode.UNAUTHORIZED: ErrorSpec(401, False),
    ErrorCode.FORBIDDEN: ErrorSpec(403, False),
    ErrorCode.NOT_FOUND: ErrorSpec(404, False),
    ErrorCode.MODEL_NOT_FOUND: ErrorSpec(404, False),
    ErrorCode.UNKNOWN_TOOL: ErrorSpec(404, False),
    ErrorCode.UNKNOWN_AGENT: ErrorSpec(404, False),
    ErrorCode.UNKNOWN_DATA_SOURCE: ErrorSpec(422, False),
    ErrorCode.INSTANCE_NOT_FOUND: ErrorSpec(404, False),
    ErrorCode.INSTANCE_LOST: ErrorSpec(410, False),
    ErrorCode.CONFLICT: ErrorSpec(409, False),
    ErrorCode.WEIGHTS_BEHIND: ErrorSpec(409, True),
    ErrorCode.PAYLOAD_TOO_LARGE: ErrorSpec(413, False),
    ErrorCode.OVERLOADED: ErrorSpec(429, True),
    ErrorCode.PAUSED: ErrorSpec(503, True),
    ErrorCode.TOOL_FAILED: ErrorSpec(500, False),
    ErrorCode.DEADLINE_EXCEEDED: ErrorSpec(504, False),
    ErrorCode.ENGINE_FAILED: ErrorSpec(500, False),
    ErrorCode.WEIGHTS_CORRUPT: ErrorSpec(500, False),
    ErrorCode.CHECKPOINT_CORRUPT: ErrorSpec(500, False),
    ErrorCode.WEIGHTS_STALE: ErrorSpec(500, False),
    ErrorCode.NOT_FINITE: ErrorSpec(500, False),
    ErrorCode.DISK_FULL: ErrorSpec(507, False),
    ErrorCode.NOT_WRITABLE: ErrorSpec(507, False),
    ErrorCode.UNAVAILABLE: ErrorSpec(503, True),
    ErrorCode.INTERNAL: ErrorSpec(500, False),
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
