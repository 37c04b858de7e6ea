"""The pure parts of the load benchmark: when a trace is a whole tree."""

import pytest
from benchmarks.load import Spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "0123456789abcdef0123456789abcdef"


def exported(*spans: tuple[bytes, bytes]) -> bytes:
    """A request with spans (id, parent) of TRACE."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for span_id, parent in spans:
        scope.spans.add(trace_id=bytes.fromhex(TRACE), span_id=span_id, parent_span_id=parent)
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("spans", "whole"),
    [
        ([(b"root", b""), (b"turn", b"root"), (b"chat", b"turn")], True),
        ([(b"root", b"")], True),
        ([(b"root", b""), (b"chat", b"turn")], False),
        ([(b"root", b""), (b"more", b"")], False),
        ([(b"turn", b"root"), (b"chat", b"turn")], True),
        ([], False),
    ],
    ids=["a tree", "a root", "a parent is missing", "two roots", "below a caller's span", "nothing"],
)
def test_a_trace_is_whole_when_only_its_root_lacks_its_parent(spans: list[tuple[bytes, bytes]], whole: bool) -> None:
    received = Spans()
    for span in spans:
        received.add(exported(span))
    assert received.whole(TRACE) is whole
    received.clear()
    assert not received.whole(TRACE)
