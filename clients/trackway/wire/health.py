"""What `/health`, `/ready` and `/replicas` answer, the same for every service."""

from pydantic import Field

from trackway.wire.base import WireReply
from trackway.wire.rollout import WeightsReply


class SpanCounts(WireReply):
    """Recorded spans of one process by their fate, since it began; a span for two backends counts at each."""

    ended: int = 0
    exported: int = 0
    dropped: int = 0
    """There was no room for them, or their backend is not known there."""
    refused: int = 0
    """The backend will never take them: it said so."""
    waiting: int = 0
    """Now, in memory and on disk."""
    spool_bytes: int = 0
    """Now, on disk."""


class Installation(WireReply):
    """The interpreter of a process and the packages it would import."""

    python: str
    executable: str
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages whose mismatch breaks a deployment: trackway, ray, pydantic, fastapi, torch."""


class Health(Installation):
    """A living process and what it runs on: two replicas that differ there are an installation error."""

    service: str
    status: str = "ok"
    replica: str
    pid: int
    trace_backends: list[str] = Field(default_factory=list)
    """Where this process can send spans: what it lacks nothing for, as far as settings and environment say."""
    spans: SpanCounts = Field(default_factory=SpanCounts)


class Ready(WireReply):
    """Whether the service can do its work now, and if not, why."""

    ready: bool
    reason: str = ""
    broken: bool = False
    """It will not become ready by itself: only a new process helps, so a health check should ask for one."""


class ReplicaInfo(WireReply):
    """One replica of a service: what it runs on, whether it is ready, and (rollout) which weights it holds."""

    health: Health
    ready: Ready
    weights: WeightsReply | None = None
    url: str | None = None
    """Where it answers by itself, past Ray Serve's proxy; None when it does so nowhere."""


class ReplicaList(WireReply):
    """Every running replica of a service."""

    replicas: list[ReplicaInfo]
    passes: dict[str, str] = Field(default_factory=dict, repr=False)
    """By replica: what to send to its `url` instead of the token that this was asked with. It is good there alone, so
    that whoever has the address by then learns no token; none without tokens."""
