"""Errors that cross process boundaries: code, HTTP status, whether a retry can succeed, whether the model sees it.

A non-2xx body of ours is always `{"error": {"code", "message", "retryable", "detail"}}`. A 5xx without such a body
comes from elsewhere (Ray Serve answers plain text when a replica dies), and is therefore retried.

TrackwayError            one class, raised on both sides of the wire: services raise it, clients raise it again
  .code                  a member of ErrorCode. ERRORS has status, retryable and `model_sees`
"""

import json
from enum import Enum, StrEnum
from typing import NamedTuple

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, named_number, well_formed

MAX_MESSAGE_CHARS = 4096
"""Longest message of an error in characters; a longer one, which quotes its input, loses its middle."""
MAX_DETAIL_BYTES = 8192
"""Longest detail of an error as JSON. Long texts are shortened, and values beyond the limit dropped."""
_SHORT_CHARS = 256


class ErrorCode(StrEnum):
    """The closed list of codes. A client may match on them."""

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
    GONE = "gone"
    CONFLICT = "conflict"
    WEIGHTS_BEHIND = "weights_behind"
    REQUEST_INCOMPLETE = "request_incomplete"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    OVERLOADED = "overloaded"
    PAUSED = "paused"
    TOOL_FAILED = "tool_failed"
    TOOL_TIMEOUT = "tool_timeout"
    AGENT_FAILED = "agent_failed"
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


class ModelSees(Enum):
    """How the message of a failed tool call becomes the model's observation."""

    NO = "no"
    """An infrastructure error: it ends the trajectory, and the model never sees it."""
    YES = "yes"
    """The call's own error: bad arguments, or a tool that raised or took too long."""
    WITHOUT_AGENT = "at `/get_observation`"
    """Only where no agent loop calls the tool: the agent service checks names, and recreates lost instances."""


class ErrorSpec(NamedTuple):
    """The HTTP status of a code, whether the same request may succeed later, its meaning, and if the model sees it."""

    status: int
    retryable: bool
    meaning: str
    model_sees: ModelSees = ModelSees.NO


ERRORS: dict[ErrorCode, ErrorSpec] = {
    ErrorCode.INVALID_REQUEST: ErrorSpec(
        422, False, "The request does not match its schema, or contains an invalid value.", ModelSees.YES
    ),
    ErrorCode.UNAUTHORIZED: ErrorSpec(401, False, "The bearer token is missing or unknown."),
    ErrorCode.FORBIDDEN: ErrorSpec(403, False, "The token lacks the scope that the route requires."),
    ErrorCode.NOT_FOUND: ErrorSpec(404, False, "There is no such route, run or file."),
    ErrorCode.MODEL_NOT_FOUND: ErrorSpec(404, False, "The service does not serve the requested model."),
    ErrorCode.UNKNOWN_TOOL: ErrorSpec(
        404, False, "The tool server offers no tool of that name.", ModelSees.WITHOUT_AGENT
    ),
    ErrorCode.UNKNOWN_AGENT: ErrorSpec(404, False, "The agent service has no agent loop of that name."),
    ErrorCode.UNKNOWN_DATA_SOURCE: ErrorSpec(422, False, "The reward service has no scorer for that data source."),
    ErrorCode.INSTANCE_NOT_FOUND: ErrorSpec(
        404,
        False,
        "The tool instance was never created on this replica, or has been released.",
        ModelSees.WITHOUT_AGENT,
    ),
    ErrorCode.INSTANCE_LOST: ErrorSpec(
        410, False, "The state of the tool instance is gone; create another one.", ModelSees.WITHOUT_AGENT
    ),
    ErrorCode.GONE: ErrorSpec(410, False, "The session of Tinker's API has ended, or the result is no longer kept."),
    ErrorCode.CONFLICT: ErrorSpec(
        409,
        False,
        "The request contradicts the current state, such as a second active run or a reused idempotency key.",
    ),
    ErrorCode.WEIGHTS_BEHIND: ErrorSpec(409, True, "The replica does not hold the requested weight version yet."),
    ErrorCode.REQUEST_INCOMPLETE: ErrorSpec(
        408, True, "The header or the body did not arrive completely: the connection broke, or the sender was too slow."
    ),
    ErrorCode.PAYLOAD_TOO_LARGE: ErrorSpec(
        413, False, "The request is over a limit in bytes or JSON items.", ModelSees.YES
    ),
    ErrorCode.OVERLOADED: ErrorSpec(429, True, "The queue is full; `Retry-After` says when to ask again."),
    ErrorCode.PAUSED: ErrorSpec(503, True, "The engine is paused, as during a weight update or while it sleeps."),
    ErrorCode.TOOL_FAILED: ErrorSpec(
        500, False, "The tool raised an exception, or its remote server refused the call.", ModelSees.YES
    ),
    ErrorCode.TOOL_TIMEOUT: ErrorSpec(
        504,
        False,
        "The tool, or its remote server, took longer than its limit, such as `call_timeout_s`.",
        ModelSees.YES,
    ),
    ErrorCode.AGENT_FAILED: ErrorSpec(500, False, "The program or function of an external agent failed."),
    ErrorCode.DEADLINE_EXCEEDED: ErrorSpec(
        504, False, "The caller's deadline, or the time limit of a score or a trajectory, has passed."
    ),
    ErrorCode.ENGINE_FAILED: ErrorSpec(500, False, "The inference engine failed or gave an invalid answer."),
    ErrorCode.WEIGHTS_CORRUPT: ErrorSpec(
        500, False, "Published weights are incomplete or damaged, or the engine holds others after loading them."
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
    ErrorCode.DISK_FULL: ErrorSpec(507, False, "The storage is full, or a quota is exhausted."),
    ErrorCode.NOT_WRITABLE: ErrorSpec(507, False, "The storage is read-only, broken, or not writable for this user."),
    ErrorCode.UNAVAILABLE: ErrorSpec(
        503, True, "The service, or one that it depends on, is starting, stopping or not responding."
    ),
    ErrorCode.INTERNAL: ErrorSpec(500, False, "An unexpected exception; the service's log has it."),
}


class ErrorBody(WireReply):
    """Fault in words: expected, got, remedy."""

    code: ErrorCode
    message: str
    retryable: bool
    detail: dict[str, JsonValue] = Field(default_factory=dict)


class ErrorReply(WireReply):
    """The body of every non-2xx answer."""

    error: ErrorBody


class TrackwayError(Exception):
    """An error with a code. The message says what was expected, what came, and the remedy."""

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
        """Return whether the same request may succeed later."""
        return ERRORS[self.code].retryable

    @property
    def model_sees(self) -> ModelSees:
        """Return whether the model sees the message, when this error ends a tool call."""
        return ERRORS[self.code].model_sees

    def to_reply(self) -> ErrorReply:
        """The wire form of this error."""
        detail = {key: _in_json(value) for key, value in self.detail.items()}
        body = ErrorBody(code=self.code, message=self.message, retryable=self.retryable, detail=detail)
        return ErrorReply(error=body)

    @classmethod
    def from_reply(cls, reply: ErrorReply) -> "TrackwayError":
        """The error in a service's answer, for the client to raise."""
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
