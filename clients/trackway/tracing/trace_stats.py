"""Trace stats: the bytes of spans that a piece of work adds to its trace, and the problems it recovered from.

A service collects them for each request and returns them in a header of the answer. The caller adds them to its own.
When a trajectory ends, the agent therefore has the size of its trace and its incidents in all processes.
"""

import re
from contextvars import ContextVar
from dataclasses import dataclass, field

from trackway.system.waits import ContextValue
from trackway.wire.trajectory import Incident

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
