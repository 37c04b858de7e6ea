"""A trace independent of its backend: a tree of spans, tags and feedback."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field, JsonValue

SERVICE_OF_SPAN = {
    "trajectory": "agent",
    "turn": "agent",
    "chat": "rollout",
    "execute_tool": "tools",
    "reward": "reward",
}
"""The service that creates each kind of span of a trajectory."""

OF_ENVIRONMENTS = frozenset({"execute_tool"})
"""Kinds that the agent creates for an environment of another project."""

OF_AGENTS = frozenset({"reward"})
"""Kinds that the agent creates where the reward service is not asked."""

KINDS = (*SERVICE_OF_SPAN, "train", "optimizer_step")
"""First words of our span names. Any other span is an `operation` of a user's agent loop."""

Status = Literal["OK", "ERROR", "UNSET"]
State = Literal["OK", "ERROR", "IN_PROGRESS"]


class SpanEvent(BaseModel):
    """An event of a span."""

    name: str
    at_ms: float
    """Milliseconds after the trace's start."""
    attributes: dict[str, JsonValue] = Field(default_factory=dict)


class SpanLink(BaseModel):
    """A link to a span of another trace."""

    trace_id: str
    """32 hex digits."""
    span_id: str


class SpanNode(BaseModel):
    """A span and its descendants."""

    span_id: str
    parent_id: str | None
    name: str
    kind: str
    """One of KINDS, or `operation`."""
    service: str
    start_ms: float
    """Milliseconds after the trace's start."""
    end_ms: float | None
    """None while the span is open."""
    status: Status = "UNSET"
    error: str = ""
    """The status message of an error."""
    inputs: JsonValue = None
    outputs: JsonValue = None
    attributes: dict[str, JsonValue] = Field(default_factory=dict)
    events: list[SpanEvent] = Field(default_factory=list)
    links: list[SpanLink] = Field(default_factory=list)
    children: list["SpanNode"] = Field(default_factory=list)
    """Child spans by start."""

    @property
    def duration_ms(self) -> float | None:
        """None while the span is open."""
        return None if self.end_ms is None else self.end_ms - self.start_ms

    def walk(self) -> Iterator["SpanNode"]:
        """This span and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


class TraceTree(BaseModel):
    """A trace: its id and tags, its feedback, and its spans."""

    trace_id: str
    """The backend's own id: `tr-<32 hex digits>` in MLflow, 32 hex digits in Weave."""
    name: str
    state: State
    tags: dict[str, str]
    started: datetime
    duration_ms: float | None
    feedback: dict[str, JsonValue] = Field(default_factory=dict)
    """The trainer's feedback: reward, advantage, fate."""
    roots: list[SpanNode]
    """The root, then the orphans."""

    @property
    def hex_id(self) -> str:
        """The OpenTelemetry trace id, 32 hex digits."""
        return hex_id(self.trace_id)

    @property
    def root(self) -> SpanNode | None:
        """The span without a parent; None if it is missing."""
        return next((span for span in self.roots if span.parent_id is None), None)

    @property
    def orphans(self) -> list[SpanNode]:
        """Spans whose parent is absent."""
        return [span for span in self.roots if span.parent_id is not None]

    def spans(self) -> Iterator[SpanNode]:
        """Every span, depth first."""
        for root in self.roots:
            yield from root.walk()

    def of_kind(self, kind: str) -> list[SpanNode]:
        """The spans of a kind, by start."""
        return sorted((span for span in self.spans() if span.kind == kind), key=lambda span: span.start_ms)


def hex_id(trace_id: str) -> str:
    """A trace id without its backend's prefix."""
    return trace_id.removeprefix("tr-")


def kind_of(name: str) -> str:
    """A span's kind by the first word of its name."""
    first = name.split(" ", 1)[0]
    return first if first in KINDS else "operation"


def assemble(spans: Iterable[SpanNode]) -> list[SpanNode]:
    """Attach each span to its parent; returns the root, if there is one, then the orphans."""
    known: Mapping[str, SpanNode] = {span.span_id: span for span in spans}
    ordered = sorted(known.values(), key=lambda span: span.start_ms)
    roots = [span for span in ordered if span.parent_id not in known]
    for span in ordered:
        parent = known.get(span.parent_id or "")
        if parent is not None:
            parent.children.append(span)
    return sorted(roots, key=lambda span: span.parent_id is not None)
