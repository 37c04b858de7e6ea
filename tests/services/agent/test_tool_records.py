"""What a call leaves: its record on the turn, what the scorer learns of it, and what the turn's span shows."""

import json
import logging

import pytest
from agent_world import World, call
from pydantic import JsonValue
from scripted_model import END

from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import Trajectory

ANSWER = "#### 18" + END
COUNT = call("counter") + END


def scored(world: World) -> dict[str, JsonValue]:
    """The extra_info that the scorer was given."""
    [request] = world.reward.requests
    return json.loads(request.content)["extra_info"]


def recorded(trajectory: Trajectory) -> list[tuple[str, float, ErrorCode | None, dict[str, float], bool]]:
    return [
        (one.tool, one.reward, one.error, one.metrics, one.truncated) for turn in trajectory.turns for one in turn.calls
    ]


@pytest.mark.anyio
async def test_each_call_that_was_sent_leaves_a_record_on_its_turn(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.counter.metrics, world.counter.text = {"pages": 2.0}, "0123456789"
    said = COUNT[: -len(END)] + call("abacus") + call("counter", '{"raise": true}') + END

    with caplog.at_level(logging.CRITICAL):
        trajectory = await world.say(said, ANSWER, limits__max_parallel_calls=3, limits__max_tool_response_length=99)

    assert recorded(trajectory) == [
        ("counter", 0.25, None, {"pages": 2.0}, False),
        ("counter", 0.0, ErrorCode.TOOL_FAILED, {}, False),
    ]
    assert [one.tool_call_id for one in trajectory.turns[0].calls] == ["call_0_0", "call_0_2"]
    assert all(one.seconds > 0 for one in trajectory.turns[0].calls)
    assert trajectory.turns[0].calls_executed == 2


@pytest.mark.anyio
async def test_a_record_says_whether_the_model_saw_the_whole_result(world: World) -> None:
    world.counter.text = "0123456789"

    trajectory = await world.say(COUNT, ANSWER, limits__max_tool_response_length=4)

    assert [one.truncated for one in trajectory.turns[0].calls] == [True]


@pytest.mark.anyio
async def test_the_scorer_learns_what_the_tools_measured_and_gave(world: World) -> None:
    world.counter.metrics, world.other.metrics = {"pages": 2.0, "bytes": 8.0}, {"pages": 1.0}

    trajectory = await world.say(COUNT, call("other") + END, COUNT, ANSWER)

    told = scored(world)
    assert told["tool_rewards"] == [0.25, 0.25, 0.25]
    assert told["tool_metrics"] == {"counter": {"pages": 4.0, "bytes": 16.0}, "other": {"pages": 1.0}}
    assert told["tool_calc_rewards"] == {"counter": 2.0, "other": 1.0}
    calls = [one.model_dump(mode="json") for turn in trajectory.turns for one in turn.calls]
    assert (told["tool_calls"], len(calls)) == (calls, 3)
    assert told["index"] == 7


@pytest.mark.anyio
async def test_the_reward_of_a_tool_without_state_is_the_sum_over_its_calls(world: World) -> None:
    world.counter.stateless = True

    trajectory = await world.say(COUNT, COUNT, ANSWER)

    assert trajectory.reward is not None
    assert trajectory.reward.components["tool/counter"] == 2.0
    assert [one.metrics for turn in trajectory.turns for one in turn.calls] == [{}, {}]


@pytest.mark.anyio
async def test_records_are_there_when_the_scoring_fails(world: World) -> None:
    world.reward.app = None

    trajectory = await world.say(COUNT, ANSWER)

    assert trajectory.error is not None and trajectory.reward is None
    assert recorded(trajectory) == [("counter", 0.25, None, {}, False)]


@pytest.mark.anyio
async def test_the_span_of_a_turn_counts_its_calls(world: World) -> None:
    said = call("counter", '{"refuse": true}') + call("abacus") + END

    await world.say(said, ANSWER, trace=True, limits__max_parallel_calls=2)

    [turn] = [span for span in world.spans() if span.name == "turn 0"]
    shown = json.loads(str((turn.attributes or {})["mlflow.spanOutputs"]))
    assert shown == {"calls": 2, "calls_executed": 1, "errors": ["invalid_request"]}
