"""What a piece of work adds to its trace: bytes of spans, and problems that it recovered from.

A service opens a ledger for each request and sends its sum back in one header of the answer; the caller adds it to its
own. So the agent knows, when a trajectory ends, what its trace weighs in all processes and what happened in them.
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
    """Of the spans that ended, before compression."""
    incidents: set[Incident] = field(default_factory=set)

    def receipt(self) -> str:
        """The value of the header `x-trackway-trace`; empty when there is nothing to tell."""
        parts = [f"bytes={self.bytes}"] if self.bytes else []
        if self.incidents:
            parts.append("incidents=" + "+".join(sorted(self.incidents)))
        return ",".join(parts)

    def add_receipt(self, receipt: str) -> None:
        """Add another process's sums; what is not understood is left out, as a newer service may say more."""
        parts = (part.partition("=") for part in receipt.split(","))
        fields = {name: value for name, _, value in parts}
        size = fields.get("bytes", "")
        self.bytes += int(size) if size.isdecimal() else 0
        known = {one.value for one in Incident}
        self.incidents |= {Incident(name) for name in fields.get("incidents", "").split("+") if name in known}


@contextmanager
def ledger() -> Iterator[TraceStats]:
    """Collect in a ledger of its own what happens inside the block, in tasks that it starts too."""
    token = _current.set(TraceStats())
    try:
        opened = _current.get()
        assert opened is not None
        yield opened
    finally:
        _current.reset(token)


def current_trace_stats() -> TraceStats | None:
    """The innermost open ledger."""
    return _current.get()


def note(incident: Incident) -> None:
    """Record a problem that was recovered from in the ledger of this piece of work."""
    opened = current_trace_stats()
    if opened is not None:
        opened.incidents.add(incident)
