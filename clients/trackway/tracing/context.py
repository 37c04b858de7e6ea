"""The trace in a request and its answer: W3C context and the trace's target in headers, stats on the way back.

`inject` and `extracted` carry traceparent, tracestate and baggage between processes. The target is sent as baggage,
because services outlive the runs that choose it.

Trace stats are the bytes of spans that a piece of work adds to its trace, and the problems it recovered from. A service
collects them for each request and returns them in a header of the answer. The caller adds them to its own. When a
trajectory ends, the agent therefore has the size of its trace and its incidents in all processes.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache

from opentelemetry import baggage, context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, create_key
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import ValidationError

from trackway.system.process import ContextValue
from trackway.tracing import attributes as names
from trackway.wire.trajectory import Incident, TraceTarget

logger = logging.getLogger("trackway.tracing")

_TRACE, _BAGGAGE = TraceContextTextMapPropagator(), W3CBaggagePropagator()
_PROPAGATOR = CompositePropagator([_TRACE, _BAGGAGE])
_TARGET = "agentic.target"
OF_EVERY_SPAN = (names.TRAJECTORY_ID, names.AGENT_NAME)
"""Attributes that every span of a trajectory has, sent as baggage."""
_KEPT_ROOT = create_key("trackway-kept-root")


def inject(headers: dict[str, str]) -> None:
    """Write the current trace context into HTTP headers."""
    _PROPAGATOR.inject(headers)


def extracted(headers: Mapping[str, str], target: TraceTarget | None = None) -> AbstractContextManager[None]:
    """Continue the trace in the headers, with the target in them or this one. Without one, nothing inside is traced."""
    incoming = _with_target(target, _with_baggage(headers.get("baggage", "")))
    if traceparent := headers.get("traceparent"):
        carried = {"traceparent": traceparent, "tracestate": headers.get("tracestate", "")}
        incoming = _TRACE.extract(carried, context=incoming)
    return _Attached(incoming)


class _Attached(AbstractContextManager[None]):
    """Makes a context the current one inside the block."""

    def __init__(self, inside: Context) -> None:
        self._inside = inside

    def __enter__(self) -> None:
        self._token = context.attach(self._inside)

    def __exit__(self, *_: object) -> None:
        context.detach(self._token)


@lru_cache(maxsize=1024)
def _with_baggage(header: str) -> Context:
    """The context with this baggage, cached because all requests of a trajectory send the same."""
    return _BAGGAGE.extract({"baggage": header}, context=Context()) if header else Context()


def current_target() -> TraceTarget:
    """The target of the current trace."""
    return _parsed(str(baggage.get_baggage(_TARGET) or ""))


def kept_root(target: TraceTarget | None = None) -> Context:
    """An empty context in which a root span is sampled. Other roots are dropped. `target` is added as baggage."""
    return _with_target(target, context.set_value(_KEPT_ROOT, True, Context()))


def _with_target(target: TraceTarget | None, parent: Context) -> Context:
    if target is None or target == TraceTarget():
        return parent
    return baggage.set_baggage(_TARGET, target.model_dump_json(exclude_defaults=True), parent)


def carrying(attributes: Mapping[str, object], parent: Context) -> Context:
    """The context in which all spans, in every process, get the attributes in `OF_EVERY_SPAN`."""
    for key in OF_EVERY_SPAN:
        if key in attributes:
            parent = baggage.set_baggage(key, str(attributes[key]), parent)
    return parent


def carried(context: Context | None) -> dict[str, str]:
    """The attributes that `carrying` added to this context. None is the current one."""
    values = baggage.get_all(context)
    return {key: str(values[key]) for key in OF_EVERY_SPAN if key in values}


def is_kept_root(parent: Context | None) -> bool:
    """Return whether `kept_root` made this context."""
    return bool(context.get_value(_KEPT_ROOT, parent))


@lru_cache(maxsize=64)
def _parsed(text: str) -> TraceTarget:
    if not text:
        return TraceTarget()
    try:
        return TraceTarget.model_validate_json(text)
    except ValidationError as error:
        logger.warning("baggage %s is not a valid trace target; using the service's own settings: %s", _TARGET, error)
        return TraceTarget()


_SERVICE = re.compile("[A-Za-z0-9._-]{1,100}")
_current: ContextVar["TraceStats | None"] = ContextVar("trackway_ledger", default=None)


@dataclass
class TraceStats:
    """Sums of one request, or of one trajectory."""

    bytes: int = 0
    """Bytes of the ended spans, before compression."""
    incidents: set[Incident] = field(default_factory=set)
    called: set[tuple[Incident, str]] = field(default_factory=set)
    """Services whose calls had incidents."""

    @property
    def incident_services(self) -> dict[Incident, list[str]]:
        """The called services by incident, both in the order of their names."""
        services: dict[Incident, list[str]] = {}
        for incident, service in sorted(self.called):
            services.setdefault(incident, []).append(service)
        return services

    def receipt(self) -> str:
        """The value of the header `x-trackway-trace`. Empty without spans and incidents."""
        parts = [f"bytes={self.bytes}"] if self.bytes else []
        if self.incidents:
            parts.append("incidents=" + "+".join(sorted(self.incidents)))
        if self.called:
            parts.append("called=" + "+".join(f"{incident}@{service}" for incident, service in sorted(self.called)))
        return ",".join(parts)

    def add_receipt(self, receipt: str) -> None:
        """Add another process's sums. Unknown fields, as of a newer service, are ignored."""
        parts = (part.partition("=") for part in receipt.split(","))
        fields = {name: value for name, _, value in parts}
        size = fields.get("bytes", "")
        self.bytes += int(size) if size.isdecimal() else 0
        known = {incident.value for incident in Incident}
        self.incidents |= {Incident(name) for name in fields.get("incidents", "").split("+") if name in known}
        pairs = [pair.partition("@") for pair in fields.get("called", "").split("+")]
        self.called |= {
            (Incident(name), service) for name, _, service in pairs if name in known and _SERVICE.fullmatch(service)
        }


def collect_trace_stats() -> ContextValue[TraceStats]:
    """Collect the trace stats of the block and of the tasks it starts, separately from the enclosing ones."""
    return ContextValue(_current, TraceStats())


def current_trace_stats() -> TraceStats | None:
    """The stats of the innermost `collect_trace_stats` block; None outside of one."""
    return _current.get()


def note(incident: Incident, service: str = "") -> None:
    """Record a recovered problem in the current trace stats, with the called service if a call had it."""
    stats = current_trace_stats()
    if stats is None:
        return
    stats.incidents.add(incident)
    if _SERVICE.fullmatch(service):
        stats.called.add((incident, service))
