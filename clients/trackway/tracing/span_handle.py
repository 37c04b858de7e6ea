"""The active `Tracing`, and `SpanHandle`, whose methods set a span's attributes, events and status.

The active one is in a context variable, else the process's default, so that several services can run in one process,
as in tests, each with its own name.

Nothing here raises for any value, because a value that cannot be shown must not fail a rollout. Every text is redacted
and then truncated.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode
from pydantic import BaseModel

from trackway.system.process import ContextValue
from trackway.tracing import attributes as names
from trackway.tracing.context import TraceStats, current_target, note
from trackway.tracing.settings import redacted, redacted_value
from trackway.wire.base import named_number, well_formed
from trackway.wire.trajectory import Incident, WeightSpan

if TYPE_CHECKING:
    from trackway.tracing.provider import Tracing


_active: ContextVar["Tracing | None"] = ContextVar("trackway_tracing", default=None)
_installed: list["Tracing"] = []


def active_tracing() -> "Tracing | None":
    """The tracing of this context, else the process's, else None."""
    return _active.get() or (_installed[-1] if _installed else None)


def activated(tracing: "Tracing") -> AbstractContextManager[object]:
    """Make `tracing` the active one inside the block."""
    return ContextValue(_active, tracing)


def install(tracing: "Tracing | None") -> None:
    """Make `tracing` the process's default; None removes the default."""
    _installed[:] = [] if tracing is None else [tracing]


def uninstall(tracing: "Tracing") -> None:
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


Scalar = str | int | float | bool

_NESTED = (dict, list, tuple, BaseModel)
_MOST_PARTS = 10_000_000
"""More parts than any body has. A value that contains itself several times has more."""
_PART_CHARS = 65_536
LONGEST_MESSAGE = 4096
"""Bytes of a status or an event's text; MLflow cuts tags there too."""


class SpanHandle:
    """A span. Every method does nothing when it is not recorded."""

    def __init__(self, span: Span, trace_stats: TraceStats | None = None) -> None:
        self._span = span
        self._recorded = span.is_recording()
        self.trace_stats = trace_stats or TraceStats()
        """For a trajectory's root: bytes of all spans and incidents so far, in every process."""

    @property
    def trace_id(self) -> str | None:
        """32 hex digits, None when the trace is not recorded."""
        return format(self._span.get_span_context().trace_id, "032x") if self._recorded else None

    @property
    def span_id(self) -> str | None:
        """16 hex digits, None when the trace is not recorded."""
        return format(self._span.get_span_context().span_id, "016x") if self._recorded else None

    @property
    def recording(self) -> bool:
        """Return whether the span is recorded; decode text only then."""
        return self._span.is_recording()

    def set(self, key: str, value: Scalar) -> None:
        """Set an attribute. Non-finite numbers are set by name, because backends store attributes as JSON."""
        self._span.set_attribute(key, _scalar(value))

    def tag(self, key: str, value: names.Tag) -> None:
        """Set a tag of the trace. Call it on a root only."""
        self._span.set_attribute(names.TAG + key, value)

    def inputs(self, value: object) -> None:
        """Set the input, as JSON of bounded size."""
        self._set_json(names.INPUTS, value)

    def outputs(self, value: object) -> None:
        """Set the output, as JSON of bounded size."""
        self._set_json(names.OUTPUTS, value)

    def _set_json(self, key: str, value: object) -> None:
        if self.recording:
            self._span.set_attribute(key, shown(value))

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> None:
        """Set token counts; MLflow sums them over the tree."""
        self._span.set_attribute(names.INPUT_TOKENS, prompt_tokens)
        self._span.set_attribute(names.OUTPUT_TOKENS, completion_tokens)
        if cached_tokens:
            self._span.set_attribute(names.CACHED_TOKENS, cached_tokens)

    def finish_reasons(self, reasons: Sequence[str]) -> None:
        """Set the reasons why generation ended."""
        self._span.set_attribute(names.FINISH_REASONS, list(reasons))

    def stop_sequences(self, stops: Sequence[str]) -> None:
        """Set the texts that end the generation."""
        if stops:
            self._span.set_attribute(names.STOP_SEQUENCES, [well_formed(stop) for stop in stops])

    def weight_versions(self, spans: Sequence[WeightSpan]) -> None:
        """Set the weight version that generated the text, or `3,4` when weights changed during generation."""
        versions = ",".join(str(span.version) for span in spans)
        self._span.set_attribute(names.WEIGHT_VERSION, versions)

    def score(self, value: float) -> None:
        """Set the score of an evaluation."""
        self._span.set_attribute(names.EVALUATION_SCORE, named_number(value))

    def error(self, message: str, code: str) -> None:
        """Mark the span as failed."""
        if self.recording:
            self._span.set_status(Status(StatusCode.ERROR, _text(message)))
            self._span.set_attribute(names.ERROR_TYPE, code)

    def event(self, name: str, **attributes: Scalar) -> None:
        """Add an event to the span."""
        _event(self._span, name, attributes)


def set_tools(schemas: Sequence[BaseModel]) -> None:
    """Set the tools that the model is offered on the current span. Each schema has a `function`."""
    span = trace.get_current_span()
    if schemas and span.is_recording():
        span.set_attribute(names.TOOL_DEFINITIONS, shown(schemas))


def add_event(name: str, **attributes: Scalar) -> None:
    """Add an event to the current span."""
    _event(trace.get_current_span(), name, attributes)


def add_incident(incident: Incident, *, called: str = "", **attributes: Scalar) -> None:
    """Record a recovered problem: as an event on the span, and in the trace stats even without a trace.

    called: of a call's problem, the service.
    """
    note(incident, called)
    add_event(incident.value, **attributes)


def _event(span: Span, name: str, attributes: Mapping[str, Scalar]) -> None:
    if span.is_recording():
        shown_attributes = {
            key: _text(value) if isinstance(value, str) else _scalar(value) for key, value in attributes.items()
        }
        span.add_event(name, shown_attributes)


def _scalar(value: Scalar) -> Scalar:
    if isinstance(value, str):
        return well_formed(value)
    return named_number(value) if isinstance(value, float) else value


def shown(value: object) -> str:
    """JSON of `value` for a span. If it is too long, its texts are truncated and the structure stays readable."""
    try:
        return _json(value)
    except Exception as error:
        # A repr that raises, a cycle, or invalid keys must not fail the rollout.
        return json.dumps(f"[not shown: {type(error).__name__}]")


def _json(value: object) -> str:
    tracing = active_tracing()
    max_bytes = 16384 if tracing is None else tracing.settings.max_text_bytes
    longest_text, parts = _measured(value)
    if (tracing is None or tracing.redact is None) and longest_text > max_bytes:
        return _within(max_bytes, _tree(value))  # avoids encoding the whole value
    text = _ENCODER.encode(value)
    if "NaN" in text or "Infinity" in text:  # bare NaN is invalid JSON; inside a text it stays
        text = json.dumps(json.loads(text, parse_constant=str), ensure_ascii=False)
    if tracing is not None and tracing.redact is not None:
        redact = tracing.redact
        text = json.dumps(redacted_value(json.loads(text), redact), ensure_ascii=False)
    if len(text.encode()) <= max_bytes:
        return text
    if parts > max_bytes:  # too long even without its texts
        return json.dumps(truncate(text, max_bytes), ensure_ascii=False)
    return _within(max_bytes, json.loads(text))


def _within(max_bytes: int, plain: object) -> str:
    """JSON in which each text is truncated to its share of the bytes."""
    fair_share = max(64, max_bytes // max(1, _count_texts(plain)))
    cut = json.dumps(_each_text(plain, lambda text: truncate(text, fair_share)), ensure_ascii=False)
    return cut if len(cut.encode()) <= 2 * max_bytes else json.dumps(truncate(cut, max_bytes), ensure_ascii=False)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, BaseModel):
        return vars(value).values()
    return value if isinstance(value, list | tuple) else ()


def _measured(value: object) -> tuple[int, int]:
    """Characters of the longest text, and the number of parts, down to 64 levels; the encoder reports cycles."""
    longest = parts = 0
    level: Sequence[object] = [value]
    for _ in range(64):
        parts += len(level)
        longest = max(longest, max((len(part) for part in level if isinstance(part, str)), default=0))
        level = [inner for part in level if isinstance(part, _NESTED) for inner in _parts(part)]
        if not level or parts > _MOST_PARTS:
            break
    return longest, parts


def _tree(value: object) -> object:
    """The value as parsed JSON would be, without copying its texts."""
    if isinstance(value, BaseModel):
        value = {name: item for name, item in vars(value).items() if item is not None}
    if isinstance(value, dict):
        return {key: _tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tree(item) for item in value]
    if isinstance(value, float):
        return named_number(value)
    return value if value is None or isinstance(value, str | int) else repr(value)


def _count_texts(value: object) -> int:
    if isinstance(value, dict | list):
        return sum(map(_count_texts, value.values() if isinstance(value, dict) else value))
    return int(isinstance(value, str))


def _each_text(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, dict):
        return {key: _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    tracing = active_tracing()
    return truncate(redacted(text, tracing.redact if tracing else None), LONGEST_MESSAGE)


def truncate(text: str, max_bytes: int) -> str:
    """`text` truncated to about `max_bytes` of UTF-8, with the marker `[truncated N bytes]`."""
    size = utf8_size(text)
    if size <= max_bytes:
        return well_formed(text)
    kept = text[:max_bytes].encode(errors="replace")[:max_bytes].decode(errors="ignore")
    return f"{kept}[truncated {size - len(kept.encode())} bytes]"


def utf8_size(text: str) -> int:
    """Bytes of the text in UTF-8, counted without copying a long text."""
    if text.isascii():
        return len(text)
    parts = (text[start : start + _PART_CHARS] for start in range(0, len(text), _PART_CHARS))
    return sum(len(part.encode(errors="replace")) for part in parts)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return repr(value)


_ENCODER = json.JSONEncoder(default=_plain, ensure_ascii=False)
