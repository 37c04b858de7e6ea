"""Rollouts with chosen scores, for the tests of evaluations."""

from trackway.wire.chat import Message
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import Reward, StopReason, Tags, ToolCallRecord, Trajectory, Turn

LOST = ErrorBody(code=ErrorCode.UNAVAILABLE, message="m", retryable=True)


def rollout(
    row: int, number: int, score: float | None, answer: str | None = None, prompt: str = "", **changes: object
) -> Trajectory:
    """A rollout of a row with two tokens of the model; `score` None for an infrastructure error."""
    calls = [ToolCallRecord(tool="t", tool_call_id="a"), ToolCallRecord(tool="t", tool_call_id="b", error=LOST.code)]
    turn = Turn(index=0, messages=[], response_start=0, response_end=2, finish_reason="stop", calls=calls)
    values: dict[str, object] = {
        "id": f"e/val0/{row}/{number}",
        "session_id": "s",
        "tags": Tags(experiment_name="e", step=0, sample_index=row, rollout_n=number, validate=True),
        "agent_name": "a",
        "data_source": "d",
        "prompt_ids": [1],
        "prompt_messages": [Message(role="user", content=prompt or f"row {row}")],
        "response_ids": [2, 3, 4],
        "response_mask": [1, 1, 0],
        "response_logprobs": [0.0] * 3,
        "turns": [turn],
        "stop_reason": StopReason.ANSWERED,
    }
    if score is None:
        values |= {"error": LOST, "stop_reason": StopReason.ERROR}
    else:
        values["reward"] = Reward(score=score, answer=answer)
    return Trajectory.model_validate({**values, **changes})
