"""W3C context over HTTP headers, and the tracing that is active here.

`inject` and `extracted` are all that crosses a process: traceparent, tracestate and baggage. The active `Tracing` is a
context variable, so that several services can live in one process (tests do) and each traces under its own name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trackway.tracing import attributes as names

if TYPE_CHECKING:
    from trackway.tracing.provider import Tracing

_PROPAGATOR = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
_active: ContextVar[Tracing | None] = ContextVar("trackway_tracing", default=None)
_installed: list[Tracing] = []


def inject(headers: dict[str, str]) -> None:
    """Write the current trace context into HTTP headers."""
    _PROPAGATOR.inject(headers)


@contextmanager
def extracted(headers: Mapping[str, str]) -> Iterator[None]:
    """Continue the trace that the headers carry; without one, whatever runs inside is not traced."""
    token = context.attach(_PROPAGATOR.extract(headers, context=Context()))
    try:
        yield
    finally:
        context.detach(token)


def active_tracing() -> Tracing | None:
    """The tracing of this context, else the process's, else None."""
    return _active.get() or (_installed[-1] if _installed else None)


@contextmanager
def activated(tracing: Tracing) -> Iterator[None]:
    """Make `tracing` the active one inside the block."""
    token = _active.set(tracing)
    try:
        yield
    finally:
        _active.reset(token)


def install(tracing: Tracing) -> None:
    """Make `tracing` the process's default."""
    _installed[:] = [tracing]


def tracer() -> trace.Tracer:
    """The active tracer; a no-op one when nothing is active."""
    tracing = active_tracing()
    return trace.NoOpTracer() if tracing is None else tracing.tracer


def token2text() -> bool:
    """Whether spans should carry decoded text."""
    tracing = active_tracing()
    return tracing is not None and tracing.settings.token2text


def max_text_bytes() -> int:
    """Cap of one text attribute in bytes of UTF-8."""
    tracing = active_tracing()
    return 16384 if tracing is None else tracing.settings.max_text_bytes


def with_experiment(parent: Context, experiment_id: str | None) -> Context:
    """`parent` with the MLflow experiment as baggage, so that every service exports the tree to the same place."""
    if experiment_id is None:
        return parent
    return baggage.set_baggage(names.EXPERIMENT_ID, experiment_id, parent)
