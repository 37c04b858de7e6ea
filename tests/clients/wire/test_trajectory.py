"""The trajectory's own rules: versions of weights, as our service and a plain vLLM spell them; what calls leave."""

import pytest
from pydantic import ValidationError

from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import ToolCallRecord, Turn, WeightSpan, add_span, settle_spans


@pytest.mark.parametrize(("spelled", "number"), [(7, 7), ("7", 7), ("default", 0)])
def test_a_version_is_a_number_also_when_vllm_spells_it(spelled: object, number: int) -> None:
    span = WeightSpan.model_validate({"version": spelled, "start": 0, "end": 8})
    assert span == WeightSpan(version=number, start=0, end=8)
    assert span.model_dump() == {"version": number, "start": 0, "end": 8}


@pytest.mark.parametrize("spelled", ["step-7", "", "Default", None])
def test_a_version_that_is_no_number_is_refused(spelled: object) -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        WeightSpan.model_validate({"version": spelled, "start": 0, "end": 8})


def test_spans_of_other_kv_are_kept_apart_and_say_so() -> None:
    spans: list[WeightSpan] = []
    add_span(spans, 2, 0, 3)
    add_span(spans, 2, 3, 5, kv_version=1)
    add_span(spans, 2, 5, 6, kv_version=1)
    assert [span.model_dump() for span in spans] == [
        {"version": 2, "start": 0, "end": 3},
        {"version": 2, "start": 3, "end": 6, "kv_version": 1},
    ]
    assert spans[1].moved(4) == WeightSpan(version=2, start=7, end=10, kv_version=1)
    settle_spans(spans, [WeightSpan(version=3, start=0, end=2, kv_version=2)])
    assert [(span.end, span.kv_version) for span in spans] == [(3, None), (4, 1), (6, 2)]


def test_settled_spans_replace_those_of_the_last_tokens() -> None:
    spans = [WeightSpan(version=1, start=0, end=4), WeightSpan(version=2, start=4, end=9)]
    settle_spans(spans, [WeightSpan(version=2, start=0, end=1), WeightSpan(version=3, start=1, end=3)])
    assert [(span.version, span.start, span.end) for span in spans] == [(1, 0, 4), (2, 4, 7), (3, 7, 9)]
    settle_spans(spans, [WeightSpan(version=1, start=0, end=6)])
    assert [(span.version, span.start, span.end) for span in spans] == [(1, 0, 9)]
    settle_spans(spans, [])
    assert [(span.version, span.start, span.end) for span in spans] == [(1, 0, 9)]


def test_the_record_of_a_call_crosses_the_wire() -> None:
    failed = ToolCallRecord(tool="python", tool_call_id="c", seconds=0.5, error=ErrorCode.TOOL_FAILED, truncated=True)
    turn = Turn(index=0, messages=[], response_start=0, response_end=0, finish_reason="stop", calls=[failed])

    sent = turn.model_dump_json()

    assert Turn.model_validate_json(sent) == turn
    assert turn.model_dump(mode="json")["calls"] == [
        {
            "tool": "python",
            "tool_call_id": "c",
            "seconds": 0.5,
            "reward": 0.0,
            "error": "tool_failed",
            "metrics": {},
            "truncated": True,
        }
    ]
