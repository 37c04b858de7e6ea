"""Encoder of spans as OTLP protobuf, at a fraction of the cost of OpenTelemetry's own encoder.

The fast path covers most spans: attributes that are strings, numbers or booleans, without events and links. Other spans
and the enclosing messages are encoded by OpenTelemetry.
"""

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from opentelemetry.util.types import AttributeValue

# Tags of trace.proto's and common.proto's fields: number * 8 + wire type; 16 and above take two bytes.
_IDS = Struct(">2s16s2s8s")
_TIMES = Struct("<BQBQ")
_FLAGS = Struct("<2sI")
_DOUBLE = Struct("<Bd")
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_START, _END, _FLAGS_TAG = 0x39, 0x41, b"\x85\x01"
_NAME, _ATTRIBUTE = b"\x2a", b"\x4a"
_UNSET_STATUS = b"\x7a\x00"
_KEY, _VALUE = b"\x0a", b"\x12"
_STRING, _TRUE, _FALSE, _INT, _DOUBLE_TAG = b"\x0a", b"\x10\x01", b"\x10\x00", b"\x18", 0x21
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200


def serialized(spans: Sequence[ReadableSpan]) -> bytes:
    """An ExportTraceServiceRequest with these spans; all are of one tracer."""
    around = encode_spans(spans[:1])
    [resource_spans] = around.resource_spans
    [scope_spans] = resource_spans.scope_spans
    del scope_spans.spans[:]
    inner = scope_spans.SerializeToString() + b"".join(_field(b"\x12", _span(span)) for span in spans)
    del resource_spans.scope_spans[:]
    return _field(b"\x0a", resource_spans.SerializeToString() + _field(b"\x12", inner))


def _span(span: ReadableSpan) -> bytes:
    written = _plain_span(span)
    if written is None:
        return encode_spans([span]).resource_spans[0].scope_spans[0].spans[0].SerializeToString()
    return written


def _plain_span(span: ReadableSpan) -> bytes | None:
    context, parent = span.context, span.parent
    cut = span.dropped_attributes or span.dropped_events or span.dropped_links
    if cut or span.events or span.links or context is None or context.trace_state:
        return None
    if span.status.status_code is not StatusCode.UNSET or span.start_time is None or span.end_time is None:
        return None
    parts = [_IDS.pack(_TRACE_ID, context.trace_id.to_bytes(16), _SPAN_ID, context.span_id.to_bytes(8))]
    if parent is not None:
        parts += (_PARENT_ID, parent.span_id.to_bytes(8))
    parts.append(_field(_NAME, span.name.encode(errors="replace")))
    parts.append(b"\x30%c" % (span.kind.value + 1))
    parts.append(_TIMES.pack(_START, span.start_time, _END, span.end_time))
    for key, value in (span.attributes or {}).items():
        written = _value(value)
        if written is None:
            return None
        parts.append(_field(_ATTRIBUTE, _key(key) + _field(_VALUE, written)))
    flags = _HAS_IS_REMOTE | (_IS_REMOTE if parent is not None and parent.is_remote else 0)
    parts += (_UNSET_STATUS, _FLAGS.pack(_FLAGS_TAG, flags))
    return b"".join(parts)


def _value(value: AttributeValue) -> bytes | None:
    """An AnyValue; None for a sequence."""
    if type(value) is str:
        return _field(_STRING, value.encode(errors="replace"))
    if type(value) is bool:
        return _TRUE if value else _FALSE
    if type(value) is int:
        return _INT + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if type(value) is float:
        return _DOUBLE.pack(_DOUBLE_TAG, value)
    return None


@lru_cache(maxsize=1024)
def _key(key: str) -> bytes:
    return _field(_KEY, key.encode(errors="replace"))


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    return _SMALL[number] if number < len(_SMALL) else _long_varint(number)


def _long_varint(number: int) -> bytes:
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


_SMALL = tuple(map(_long_varint, range(2048)))
