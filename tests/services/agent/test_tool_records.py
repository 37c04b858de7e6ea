"""What a call leaves: its record on the turn, what the scorer learns of it, and what the turn's span shows."""

import json
import linecache
import logging

import pytest
from pydantic import JsonValue

from tests.services.agent import agent_services
from tests.services.agent.agent_services import AgentServices, call
from tests.services.agent.scripted_model import END
from trackway.wire.chat import MAX_MESSAGES, Message
from trackway.wire.errors import ErrorCode
from trackway.wire.reward import ScoreRequest
from trackway.wire.trajectory import StopReason, Trajectory

ANSWER = "#### 18" + END
COUNT = call("counter") + END


def scored(services: AgentServices) -> dict[str, JsonValue]:
    """The extra_info that the scorer was given."""
    [request] = services.reward.requests
    return json.loads(request.content)["extra_info"]


def recorded(trajectory: Trajectory) -> list[tuple[str, float, ErrorCode | None, dict[str, float], bool]]:
    return [
        (call.tool, call.reward, call.error, call.metrics, call.truncated)
        for turn in trajectory.turns
        for call in turn.calls
    ]


@pytest.mark.anyio
async def test_each_call_that_was_sent_leaves_a_record_on_its_turn(
    services: AgentServices, caplog: pytest.LogCaptureFixture
) -> None:
    services.counter.metrics, services.counter.text = {"pages": 2.0}, "0123456789"
    said = COUNT[: -len(END)] + call("abacus") + call("counter", '{"raise": true}') + END

    with caplog.at_level(logging.CRITICAL):
        trajectory = await services.say(said, ANSWER, limits__max_parallel_calls=3, limits__max_tool_response_length=99)

    assert recorded(trajectory) == [
        ("counter", 0.25, None, {"pages": 2.0}, False),
        ("counter", 0.0, ErrorCode.TOOL_FAILED, {}, False),
    ]
    assert [call.tool_call_id for call in trajectory.turns[0].calls] == ["call00000", "call00002"]
    assert all(call.seconds > 0 for call in trajectory.turns[0].calls)
    assert trajectory.turns[0].calls_executed == 2


@pytest.mark.anyio
async def test_a_failed_call_keeps_its_message_though_the_response_has_no_room_for_it(
    services: AgentServices, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        trajectory = await services.say(call("counter", '{"raise": true}') + END, limits__max_response_length=70)

    [record] = trajectory.turns[0].calls
    assert (trajectory.stop_reason, len(trajectory.turns[0].messages)) == (StopReason.MAX_RESPONSE, 1)
    assert record.error is ErrorCode.TOOL_FAILED
    message, _, line = record.message.rpartition(":")
    assert message == f"tool 'counter' failed in execute: RuntimeError: out of order ({agent_services.__file__}"
    assert 'raise RuntimeError("out of order")' in linecache.getline(agent_services.__file__, int(line.rstrip(")")))


@pytest.mark.anyio
async def test_a_record_says_whether_the_model_saw_the_whole_result(services: AgentServices) -> None:
    services.counter.text = "0123456789"

    trajectory = await services.say(COUNT, ANSWER, limits__max_tool_response_length=4)

    assert [call.truncated for call in trajectory.turns[0].calls] == [True]


@pytest.mark.anyio
async def test_the_scorer_learns_what_the_tools_measured_and_gave(services: AgentServices) -> None:
    services.counter.metrics, services.other_tool.metrics = {"pages": 2.0, "bytes": 8.0}, {"pages": 1.0}

    trajectory = await services.say(COUNT, call("other") + END, COUNT, ANSWER)

    told = scored(services)
    assert told["tool_rewards"] == [0.25, 0.25, 0.25]
    assert told["tool_metrics"] == {"counter": {"pages": 4.0, "bytes": 16.0}, "other": {"pages": 1.0}}
    assert told["tool_calc_rewards"] == {"counter": 2.0, "other": 1.0}
    calls = [call.model_dump(mode="json") for turn in trajectory.turns for call in turn.calls]
    assert (told["tool_calls"], len(calls)) == (calls, 3)
    assert told["index"] == 7


@pytest.mark.anyio
async def test_the_scorer_gets_the_conversation_with_calls_and_their_answers(services: AgentServices) -> None:
    services.counter.text = "one"

    trajectory = await services.say(COUNT, ANSWER)

    [request] = services.reward.requests
    told = [Message.model_validate(message) for message in json.loads(request.content)["messages"]]
    said = [message for turn in trajectory.turns for message in turn.messages]
    assert told == [*trajectory.prompt_messages, *said]
    assert [(message.role, message.content) for message in told[-2:]] == [("tool", "one"), ("assistant", "#### 18")]
    assert told[-3].tool_calls is not None and told[-3].tool_calls[0].function.name == "counter"


def test_a_conversation_to_score_has_room_behind_the_longest_prompt() -> None:
    prompt = [Message(role="user", content="?")] * MAX_MESSAGES
    answer = Message(role="assistant", content="!")

    request = ScoreRequest(data_source="sums", solution_str="!", ground_truth="!", messages=[*prompt, answer])

    assert len(request.messages) == MAX_MESSAGES + 1


@pytest.mark.anyio
async def test_the_reward_of_a_tool_without_state_is_the_sum_over_its_calls(services: AgentServices) -> None:
    services.counter.stateless = True

    trajectory = await services.say(COUNT, COUNT, ANSWER)

    assert trajectory.reward is not None
    assert trajectory.reward.components["tool/counter"] == 2.0
    assert [call.metrics for turn in trajectory.turns for call in turn.calls] == [{}, {}]


@pytest.mark.anyio
async def test_records_are_there_when_the_scoring_fails(services: AgentServices) -> None:
    services.reward.app = None

    trajectory = await services.say(COUNT, ANSWER)

    assert trajectory.error is not None and trajectory.reward is None
    assert recorded(trajectory) == [("counter", 0.25, None, {}, False)]


@pytest.mark.anyio
async def test_the_span_of_a_turn_counts_its_calls(services: AgentServices) -> None:
    said = call("counter", '{"refuse": true}') + call("abacus") + END

    await services.say(said, ANSWER, trace=True, limits__max_parallel_calls=2)

    [turn] = [span for span in services.spans() if span.name == "turn 0"]
    shown = json.loads(str((turn.attributes or {})["agentic.outputs"]))
    assert shown == {"calls": 2, "calls_executed": 1, "errors": ["invalid_request"]}
