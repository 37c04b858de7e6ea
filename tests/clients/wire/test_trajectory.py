"""The trajectory's own rules: versions of weights, as our service and a plain vLLM spell them; what calls leave."""

import pytest
from pydantic import ValidationError

from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import ToolCallRecord, Turn, WeightSpan


@pytest.mark.parametrize(("spelled", "number"), [(7, 7), ("7", 7), ("default", 0)])
def test_a_version_is_a_number_also_when_vllm_spells_it(spelled: object, number: int) -> None:
    span = WeightSpan.model_validate({"version": spelled, "start": 0, "end": 8})
    assert span == WeightSpan(version=number, start=0, end=8)
    assert span.model_dump() == {"version": number, "start": 0, "end": 8}


@pytest.mark.parametrize("spelled", ["step-7", "", "Default", None])
def test_a_version_that_is_no_number_is_refused(spelled: object) -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        WeightSpan.model_validate({"version": spelled, "start": 0, "end": 8})


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
