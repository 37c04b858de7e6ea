"""W3C context over HTTP headers, and the target of the current trace.

`inject` and `extracted` carry traceparent, tracestate and baggage between processes. The target is sent as baggage,
because services outlive the runs that choose it.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache

from opentelemetry import baggage, context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, create_key
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import ValidationError

from trackway.tracing import attributes as names
from trackway.wire.trajectory import TraceTarget

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


def extracted(headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Continue the trace in the headers. Without one, nothing inside is traced."""
    incoming = _with_baggage(headers.get("baggage", ""))
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
    fresh = context.set_value(_KEPT_ROOT, True, Context())
    if target is None or target == TraceTarget():
        return fresh
    return baggage.set_baggage(_TARGET, target.model_dump_json(exclude_defaults=True), fresh)


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
    """Whether `kept_root` made this context."""
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
