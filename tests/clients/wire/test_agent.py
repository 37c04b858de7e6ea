"""A group request names its rollouts."""

import pytest
from pydantic import ValidationError

from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.sessions import SessionRequest
from trackway.wire.trajectory import StopReason, Tags, Trajectory

SAMPLE = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "user", "content": "6 * 9?"}],
    "reward_model": {"ground_truth": "54"},
    "extra_info": {"index": 17},
}


def request(validate: bool) -> GroupRequest:
    group = {"run": "run-a", "experiment_name": "tiny", "step": 3, "validate": validate, "sample": SAMPLE, "n": 4}
    return GroupRequest.model_validate(group)


def test_the_tags_of_a_rollout_are_those_of_its_group_and_its_number() -> None:
    wanted = Tags(experiment_name="tiny", step=3, sample_index=17, rollout_n=2, validate=True)

    assert request(validate=True).tags(2) == wanted


def test_a_failed_rollout_has_its_id_and_its_error_and_no_tokens() -> None:
    failed = request(validate=False).failed(2, TrackwayError(ErrorCode.UNAVAILABLE, "no agent answers", replica="b"))

    assert failed == Trajectory(
        id="run-a/3/17/2",
        session_id="run-a/3/17/2",
        tags=Tags(experiment_name="tiny", step=3, sample_index=17, rollout_n=2),
        agent_name="tool_agent",
        data_source="openai/gsm8k",
        stop_reason=StopReason.ERROR,
        error=ErrorBody(
            code=ErrorCode.UNAVAILABLE, message="no agent answers", retryable=True, detail={"replica": "b"}
        ),
    )


def test_a_session_is_a_rollout_of_a_group_of_at_most_1024() -> None:
    assert SessionRequest.model_validate({"sample": SAMPLE, "rollout_n": 1023}).group().rollout_numbers() == [1023]
    with pytest.raises(ValidationError, match="less than 1024"):
        SessionRequest.model_validate({"sample": SAMPLE, "rollout_n": 1024})
