"""A trace independent of its backend: a tree of spans, tags and feedback."""

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue

from trackway.tracing import attributes as names
from trackway.tracing import conventions

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

_TEXTS = ((names.INPUTS, names.MLFLOW_INPUTS), (names.OUTPUTS, names.MLFLOW_OUTPUTS))

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
    """Empty for a span that an agent's framework recorded."""
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

    def is_same_call(self, own: "SpanNode") -> bool:
        """Return whether this span of a framework is a caller's record of a call that we recorded as `own`.

        Ours is below it if the framework sent its context with the call. If not, both overlap, and the tool or the
        number of prompt tokens is the same.
        """
        if any(span.span_id == own.span_id for span in self.walk()):
            return True
        known = names.TOOL_NAME if own.kind == "execute_tool" else names.INPUT_TOKENS
        ends = [math.inf if span.end_ms is None else span.end_ms for span in (self, own)]
        overlap = self.start_ms <= ends[1] and own.start_ms <= ends[0]
        return overlap and self.attributes.get(known) == own.attributes.get(known)


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
        """The span without a parent, or None if it is missing."""
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
        """The services' spans of a kind, by start."""
        return [span for span in self._by_start(kind) if span.service]

    def of_frameworks(self, kind: str) -> list[SpanNode]:
        """The spans of a kind that agents' frameworks recorded, by start, except records of our services' calls."""
        own = self.of_kind(kind)
        others = (span for span in self._by_start(kind) if not span.service)
        return [span for span in others if not any(map(span.is_same_call, own))]

    def _by_start(self, kind: str) -> list[SpanNode]:
        return sorted((span for span in self.spans() if span.kind == kind), key=lambda span: span.start_ms)


def hex_id(trace_id: str) -> str:
    """A trace id without its backend's prefix."""
    return trace_id.removeprefix("tr-")


def kind_of(name: str) -> str:
    """A span's kind by the first word of its name."""
    first = name.split(" ", 1)[0]
    return first if first in KINDS else "operation"


def facts_of(name: str, attributes: Mapping[str, JsonValue]) -> dict[str, Any]:
    """The kind, service, inputs, outputs and attributes of a SpanNode, from a stored span of ours or a framework's."""
    foreign = conventions.is_foreign(attributes)
    rest = conventions.as_our_own(attributes) if foreign else dict(attributes)
    texts = [(rest.pop(own, None), rest.pop(stored, None)) for own, stored in _TEXTS]
    inputs, outputs = (own if stored is None or (foreign and own is not None) else stored for own, stored in texts)
    return {
        "kind": conventions.work_of(attributes) if foreign else kind_of(name),
        "service": str(attributes.get(names.SERVICE) or ""),
        "inputs": inputs,
        "outputs": outputs,
        "attributes": rest,
    }


def assemble(spans: Iterable[SpanNode]) -> list[SpanNode]:
    """Attach each span to its parent. Returns the root, if there is one, then the orphans."""
    known: Mapping[str, SpanNode] = {span.span_id: span for span in spans}
    ordered = sorted(known.values(), key=lambda span: span.start_ms)
    roots = [span for span in ordered if span.parent_id not in known]
    for span in ordered:
        parent = known.get(span.parent_id or "")
        if parent is not None:
            parent.children.append(span)
    return sorted(roots, key=lambda span: span.parent_id is not None)
