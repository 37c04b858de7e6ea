"""Responses of `/health`, `/ready` and `/replicas`, and what a process waits for; shared by all services."""

from typing import Literal

from pydantic import Field

from trackway.wire.base import WireReply
from trackway.wire.rollout import WeightsReply

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
    """None when it has none."""
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
    """How far it is, and its newest problem."""
    because: list["Wait"] = Field(default_factory=list["Wait"])
    """Waits behind it, the longest first; only as many as help."""
