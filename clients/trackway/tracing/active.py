"""The active `Tracing`: of this context, else of the process.

It is a context variable, so that several services can run in one process, as in tests, each with its own name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry import trace

from trackway.system.waits import ContextValue
from trackway.tracing.context import current_target

if TYPE_CHECKING:
    from trackway.tracing.provider import Tracing

_active: ContextVar[Tracing | None] = ContextVar("trackway_tracing", default=None)
_installed: list[Tracing] = []


def active_tracing() -> Tracing | None:
    """The tracing of this context, else the process's, else None."""
    return _active.get() or (_installed[-1] if _installed else None)


def activated(tracing: Tracing) -> AbstractContextManager[object]:
    """Make `tracing` the active one inside the block."""
    return ContextValue(_active, tracing)


def install(tracing: Tracing | None) -> None:
    """Make `tracing` the process's default; None removes the default."""
    _installed[:] = [] if tracing is None else [tracing]


def uninstall(tracing: Tracing) -> None:
    """Remove the process's default if it is `tracing`."""
    if tracing in _installed:
        install(None)


def tracer() -> trace.Tracer:
    """The active tracer. A no-op one when nothing is active."""
    tracing = active_tracing()
    return trace.NoOpTracer() if tracing is None else tracing.tracer


def token2text() -> bool:
    """Return whether spans of the current trace should carry decoded text."""
    wanted = current_target().token2text
    if wanted is not None:
        return wanted
    tracing = active_tracing()
    return tracing is not None and tracing.settings.token2text
