"""Parts that all services share: headers beyond W3C's, `/health`, `/ready` and `/replicas`, waits, batches."""

import hashlib
import re
from typing import Annotated, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, Field

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.errors import ErrorBody
from trackway.wire.rollout import WeightsReply

LONGEST_TEXT = 256
"""Most characters of a session id or a key in a header."""

_AS_IT_IS = re.compile(rf"[\x20-\x7e]{{1,{LONGEST_TEXT}}}")
_DIGEST_CHARS = 32

SESSION_ID = "x-session-id"
"""Affinity hint: Ray Serve's consistent-hash router keeps one session on one replica."""

IDEMPOTENCY_KEY = "idempotency-key"
"""A repeated POST with the same key gets the first answer and never runs twice."""

REQUEST_TIMEOUT = "x-request-timeout"
"""Seconds, as a decimal number, that the caller still waits. The receiver counts them by its own clock."""

TRACE_RECEIPT = "x-trackway-trace"
"""On a response: what the request added to its trace, `bytes=1234,incidents=weights_behind+tool_timeout`."""

REPLICA = "x-trackway-replica"
"""On a response: the name of the replica, as in `/health`."""


def header_text(text: str) -> str:
    """A session id or a key encoded for a header: printable ASCII unchanged, any other text percent-encoded.

    A value that is too long for a header keeps its beginning and ends with a digest of the whole. The same text always
    gives the same header, so that requests can be routed by it.
    """
    if _AS_IT_IS.fullmatch(text):
        return text
    encoded = quote(text, safe="/", errors="replace")
    if 1 <= len(encoded) <= LONGEST_TEXT:
        return encoded
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST_CHARS]
    return f"{encoded[: LONGEST_TEXT - _DIGEST_CHARS - 1]}~{digest}"


ServiceName = Literal["rollout", "agent", "tools", "reward", "trainer"]


class SpanCounts(WireReply):
    """Span counts of one process since its start. A span for two backends counts twice."""

    ended: int = 0
    exported: int = 0
    dropped: int = 0
    """Spans dropped because the queue or the spool was full, or because the process has no such backend."""
    refused: int = 0
    """Spans that the backend rejected permanently."""
    waiting: int = 0
    """Spans waiting: not encoded yet, in memory and on disk."""
    spool_bytes: int = 0
    """Bytes waiting on disk."""


class Installation(WireReply):
    """The interpreter of a process and the versions of its packages."""

    python: str
    executable: str
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages whose mismatch breaks a deployment: trackway, ray, pydantic, fastapi, torch."""


class OwnCode(WireReply):
    """The user's own code that a process has loaded: the modules and files that its settings name."""

    digest: str
    """First 16 hexadecimal digits of the sha256 of its files, by name and content."""
    commit: str = ""
    """Git commit of its folder, with `+changes` after it when files differ from it. Empty without git."""
    modules: list[str] = Field(default_factory=list[str])
    files: list[str] = Field(default_factory=list[str])
    """Names of its files, the first 100."""


class Health(Installation):
    """A live process and its installation, which must be the same for all replicas of a deployment."""

    service: str
    status: str = "ok"
    replica: str
    pid: int
    trace_backends: list[str] = Field(default_factory=list[str])
    """Backends to which this process can export, according to its settings and environment."""
    spans: SpanCounts = Field(default_factory=SpanCounts)
    code: OwnCode | None = None
    """None without such code."""
    threads: int | None = None
    """CPU threads that torch computes with in this process, or None without torch."""


class Ready(WireReply):
    """The readiness of a service, with the reason if it is not ready."""

    ready: bool
    reason: str = ""
    broken: bool = False
    """The service cannot recover by itself. A health check should restart the process."""


class ReplicaInfo(WireReply):
    """One replica of a service: its installation, whether it is ready, and (rollout) which weights it holds."""

    health: Health
    ready: Ready
    weights: WeightsReply | None = None
    url: str | None = None
    """Its own address, without Ray Serve's proxy, or None without one."""


class ReplicaList(WireReply):
    """Every running replica of a service."""

    replicas: list[ReplicaInfo]
    passes: dict[str, str] = Field(default_factory=dict, repr=False)
    """Token of each replica, to send to its `url` instead of the caller's own. It is valid at that replica only, so a
    process that takes over the address cannot use it elsewhere. Empty without tokens."""


class Wait(WireReply):
    """A wait in progress, or a computation that others wait for, and what that itself waits for."""

    who: str
    """Who waits: `the learner`, `group 5/17` (step and prompt), `rollout 5/17/0`."""
    waits_for: str
    """Thing that it waits for: `rollouts of step 5`, `tool python`."""
    since: int
    """Milliseconds since 1970."""
    until: int | None = None
    """Its deadline in milliseconds since 1970, or None without one."""
    progress: str = ""
    """Its progress, and its newest problem."""
    because: list["Wait"] = Field(default_factory=list["Wait"])
    """Waits behind it, the longest first; only as many as help."""


RequestT = TypeVar("RequestT", bound=BaseModel)
ReplyT = TypeVar("ReplyT", bound=BaseModel)

TraceHeader = Annotated[str, Field(max_length=8192)]
"""W3C's limit of the header `baggage`."""

MAX_BATCH = 64
"""Most requests in a batch."""


class BatchEntry(WireRequest, Generic[RequestT]):
    """One request of a batch. It has the same reply as it would have on its own."""

    request: RequestT
    trace: dict[str, TraceHeader] = Field(default_factory=dict[str, TraceHeader], max_length=3)
    """The headers `traceparent`, `tracestate` and `baggage` of the request's own trace."""


class BatchRequest(WireRequest, Generic[RequestT]):
    """Requests to run at the same time."""

    entries: list[BatchEntry[RequestT]] = Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)


class BatchResult(WireReply, Generic[ReplyT]):
    """The reply or the error of one entry."""

    index: int
    """Index of the entry in the batch."""
    reply: ReplyT | None = None
    error: ErrorBody | None = None
    receipt: str = ""
    """Spans that the request added to its trace, as in the header `x-trackway-trace`."""
