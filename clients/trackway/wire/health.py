"""What `/health`, `/ready` and `/replicas` answer, the same for every service."""

from pydantic import Field

from trackway.wire.base import WireReply
from trackway.wire.rollout import WeightsReply


class SpanCounts(WireReply):
    """What happened to the spans of one process since its start; a span for two backends counts at each."""

    ended: int = 0
    exported: int = 0
    dropped: int = 0
    """The queue or the spool was full, or the process does not know their backend."""
    refused: int = 0
    """The backend rejected them permanently."""
    waiting: int = 0
    """Spans that wait now, in memory and on disk."""
    spool_bytes: int = 0
    """Bytes that wait on disk now."""


class Installation(WireReply):
    """The interpreter of a process and the packages it would import."""

    python: str
    executable: str
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages whose mismatch breaks a deployment: trackway, ray, pydantic, fastapi, torch."""


class Health(Installation):
    """A live process and its installation, in which the replicas of a deployment must not differ."""

    service: str
    status: str = "ok"
    replica: str
    pid: int
    trace_backends: list[str] = Field(default_factory=list)
    """Backends that this process can export to, judged by its settings and environment."""
    spans: SpanCounts = Field(default_factory=SpanCounts)


class Ready(WireReply):
    """Whether the service can do its work now, and if not, why."""

    ready: bool
    reason: str = ""
    broken: bool = False
    """The service cannot recover by itself; a health check should restart the process."""


class ReplicaInfo(WireReply):
    """One replica of a service: its installation, whether it is ready, and (rollout) which weights it holds."""

    health: Health
    ready: Ready
    weights: WeightsReply | None = None
    url: str | None = None
    """Address at which it answers directly, without Ray Serve's proxy; None when it has none."""


class ReplicaList(WireReply):
    """Every running replica of a service."""

    replicas: list[ReplicaInfo]
    passes: dict[str, str] = Field(default_factory=dict, repr=False)
    """By replica: the token to send to its `url` instead of the caller's own. It is valid there only, so another
    process that takes over the address learns no other token. Empty without tokens."""
