"""Trace stats: the bytes of spans that a piece of work adds to its trace, and the problems it recovered from.

A service collects them for each request and returns them in a header of the answer; the caller adds them to its own.
When a trajectory ends, the agent therefore has the size of its trace and its incidents in all processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from trackway.wire.tracing import Incident

_current: ContextVar["TraceStats | None"] = ContextVar("trackway_ledger", default=None)


@dataclass
class TraceStats:
    """Sums of one request, or of one trajectory."""

    bytes: int = 0
    """Bytes of the ended spans, before compression."""
    incidents: set[Incident] = field(default_factory=set)

    def receipt(self) -> str:
        """The value of the header `x-trackway-trace`; empty without spans and incidents."""
        parts = [f"bytes={self.bytes}"] if self.bytes else []
        if self.incidents:
            parts.append("incidents=" + "+".join(sorted(self.incidents)))
        return ",".join(parts)

    def add_receipt(self, receipt: str) -> None:
        """Add another process's sums; unknown fields, as of a newer service, are ignored."""
        parts = (part.partition("=") for part in receipt.split(","))
        fields = {name: value for name, _, value in parts}
        size = fields.get("bytes", "")
        self.bytes += int(size) if size.isdecimal() else 0
        known = {incident.value for incident in Incident}
        self.incidents |= {Incident(name) for name in fields.get("incidents", "").split("+") if name in known}


@contextmanager
def collect_trace_stats() -> Iterator[TraceStats]:
    """Collect the trace stats of the block and of the tasks it starts, separately from the enclosing ones."""
    token = _current.set(TraceStats())
    try:
        stats = _current.get()
        assert stats is not None
        yield stats
    finally:
        _current.reset(token)


def current_trace_stats() -> TraceStats | None:
    """The stats of the innermost `collect_trace_stats` block; None outside of one."""
    return _current.get()


def note(incident: Incident) -> None:
    """Record a recovered problem in the current trace stats."""
    stats = current_trace_stats()
    if stats is not None:
        stats.incidents.add(incident)
