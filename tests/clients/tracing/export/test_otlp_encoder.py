"""Our encoder writes what OpenTelemetry's writes, to the byte."""

from collections.abc import Callable, Sequence

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer, TraceState

from trackway.tracing.export.otlp_encoder import _plain_span, serialized


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def made(make: Callable[[Tracer], object]) -> list[ReadableSpan]:
    kept = Kept()
    provider = TracerProvider(resource=Resource({"service.name": "trackway"}), span_limits=SpanLimits(max_attributes=8))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    make(provider.get_tracer("trackway"))
    return kept.spans


def span(change: Callable[[Span], object], **options) -> Callable[[Tracer], object]:
    def make(tracer: Tracer) -> None:
        with tracer.start_as_current_span("root"), tracer.start_as_current_span("execute_tool é", **options) as child:
            change(child)

    return make


REMOTE = SpanContext(1, 2, True, TraceFlags(1), TraceState([("a", "b")]))
PLAIN = {
    "nothing": span(lambda one: None),
    "texts": span(lambda one: one.set_attributes({"a": "", "é": "7" * 130, "long": "x" * 40_000})),
    "numbers": span(lambda one: one.set_attributes({"a": 0, "b": -1, "c": 2**63 - 1, "d": 300, "e": 0.0, "f": -1.5})),
    "truth": span(lambda one: one.set_attributes({"a": True, "b": False})),
    "a kind": span(lambda one: None, kind=SpanKind.CLIENT),
}
OTHER = {
    "an event": span(lambda one: one.add_event("e", {"a": 1})),
    "a link": span(lambda one: None, links=[Link(REMOTE)]),
    "an error": span(lambda one: one.set_status(Status(StatusCode.ERROR, "why"))),
    "a list": span(lambda one: one.set_attribute("a", ["x", "y"])),
    "dropped attributes": span(lambda one: one.set_attributes({str(number): number for number in range(20)})),
}


@pytest.mark.parametrize("make", [*PLAIN.values(), *OTHER.values()], ids=[*PLAIN, *OTHER])
def test_a_request_is_the_same_to_the_byte(make: Callable[[Tracer], object]) -> None:
    spans = made(make)
    assert serialized(spans) == encode_spans(spans).SerializeToString()


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_the_common_span_is_written_by_hand(make: Callable[[Tracer], object]) -> None:
    assert all(_plain_span(one) for one in made(make))


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER)
def test_any_other_span_is_left_to_opentelemetry(make: Callable[[Tracer], object]) -> None:
    assert _plain_span(made(make)[0]) is None


def test_spans_of_both_kinds_stand_in_one_request_in_their_order() -> None:
    def make(tracer: Tracer) -> None:
        for one in (*PLAIN.values(), *OTHER.values()):
            one(tracer)

    spans = made(make)
    assert len(spans) == 2 * len(PLAIN | OTHER)
    assert serialized(spans) == encode_spans(spans).SerializeToString()
