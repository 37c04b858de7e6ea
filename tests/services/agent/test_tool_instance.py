"""A tool's instance over a trajectory: made, lost, made anew, given back; every way ends in success or an error."""

import asyncio
from contextlib import suppress

import httpx
import pytest
from agent_world import World, call, group
from replaceable import Answer, breaks
from scripted_model import END
from time_limits import ENDS_SOON

from trackway.agent.catalog import ToolSet
from trackway.agent.toolbox import Toolbox
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tools.app import create_app as create_tools
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

ANSWER = "#### 18" + END
COUNT = call("counter") + END


@pytest.mark.anyio
async def test_a_lost_instance_is_made_anew_and_its_calls_are_replayed(world: World) -> None:
    async def count_on_a_new_replica() -> str:
        world.new_tool_server()
        return COUNT

    refused = call("counter", '{"refuse": true}') + END
    trajectory = await world.say(COUNT, refused, count_on_a_new_replica, ANSWER)

    assert trajectory.error is None
    assert trajectory.turns[2].messages[-1].content == "count 3"
    assert trajectory.tool_rewards == [0.25, 0.0, 0.25]
    assert list(world.counter.counts.values()) == [3]
    assert world.counter.released == list(world.counter.counts)


@pytest.mark.anyio
async def test_two_calls_that_meet_a_lost_instance_share_its_recovery(world: World) -> None:
    async def count_twice_on_a_new_replica() -> str:
        world.new_tool_server()
        return call("counter") + COUNT

    trajectory = await world.say(COUNT, count_twice_on_a_new_replica, ANSWER, limits__max_parallel_calls=2)

    assert [message.content for message in trajectory.turns[1].messages[1:]] == ["count 2", "count 3"]


@pytest.mark.anyio
async def test_an_instance_lost_before_its_reward_is_replayed_too(world: World) -> None:
    async def answer_on_a_new_replica() -> str:
        world.new_tool_server()
        return ANSWER

    trajectory = await world.say(COUNT, answer_on_a_new_replica)

    assert trajectory.reward is not None
    assert trajectory.reward.components["tool/counter"] == 1.0


@pytest.mark.anyio
async def test_an_instance_that_is_lost_twice_ends_the_trajectory(world: World) -> None:
    async def count_on_a_new_replica() -> str:
        world.new_tool_server()
        return COUNT

    trajectory = await world.say(COUNT, count_on_a_new_replica, count_on_a_new_replica)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INSTANCE_LOST
    assert len(trajectory.turns) == 3


@pytest.mark.anyio
async def test_a_row_without_what_its_tool_needs_is_an_error_and_not_the_models_fault(world: World) -> None:
    said = call("calc_gsm8k_reward", '{"answer": "18"}') + END

    trajectory = await world.say(said, sample__extra_info__tools_kwargs={})

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert "create_kwargs.ground_truth" in trajectory.error.message


@pytest.mark.anyio
async def test_an_instance_whose_making_was_interrupted_is_released(world: World) -> None:
    making, go_on = asyncio.Event(), asyncio.Event()

    async def slow_create(instance_id: str) -> None:
        making.set()
        await go_on.wait()

    world.counter.create = slow_create  # pyright: ignore[reportAttributeAccessIssue]
    async with httpx.AsyncClient(transport=world.tools) as http:
        client = ToolsClient("http://tools", http)
        toolbox = Toolbox(client, group().sample, "run-a/1/7/0", Deadline.after(60), release_timeout_s=5)
        offer = ToolSet([world.counter.tool_schema])
        calling = asyncio.create_task(toolbox.answer({"call_0_0": ParsedCall("counter")}, offer, 1))
        await making.wait()
        calling.cancel()
        await asyncio.wait([calling])
        go_on.set()
        await toolbox.release()

    assert calling.cancelled()
    assert len(world.counter.released) == 1


@pytest.mark.anyio
async def test_an_instance_lost_again_before_its_reward_ends_the_trajectory(world: World) -> None:
    async def on_a_new_replica() -> str:
        world.new_tool_server()
        return COUNT

    async def answer_on_a_new_replica() -> str:
        world.new_tool_server()
        return ANSWER

    trajectory = await world.say(COUNT, on_a_new_replica, answer_on_a_new_replica)

    assert trajectory.error is not None
    assert (trajectory.error.code, trajectory.stop_reason) == (ErrorCode.INSTANCE_LOST, StopReason.ERROR)
    assert [[one.error for one in turn.calls] for turn in trajectory.turns] == [[None], [None], []]


@pytest.mark.anyio
async def test_an_instance_that_is_lost_while_it_is_replayed_ends_the_trajectory(world: World) -> None:
    async def lose_it_again() -> None:
        world.new_tool_server()

    async def count_on_a_new_replica() -> str:
        world.new_tool_server()
        world.counter.before = lose_it_again
        return COUNT

    trajectory = await world.say(COUNT, COUNT, count_on_a_new_replica)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INSTANCE_LOST
    assert [one.error for one in trajectory.turns[2].calls] == [ErrorCode.INSTANCE_LOST]
    assert world.counter.counts == {}  # the third replica was not asked to make another


@pytest.mark.anyio
async def test_a_tool_server_that_is_gone_for_the_replay_ends_the_trajectory(world: World) -> None:
    async def pass_on(answer: Answer) -> httpx.Response:
        return await answer()

    async def count_on_a_new_replica() -> str:
        world.new_tool_server()
        world.tools.faults = [pass_on, *[breaks(httpx.ConnectError("connection refused"))] * 2]
        return COUNT

    trajectory = await world.say(COUNT, count_on_a_new_replica)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.UNAVAILABLE
    assert [one.error for one in trajectory.turns[1].calls] == [ErrorCode.UNAVAILABLE]


@ENDS_SOON
@pytest.mark.anyio
async def test_a_call_that_was_cut_off_is_not_replayed(world: World) -> None:
    ended = asyncio.Event()

    async def does_not_stop() -> None:
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await ended.wait()

    async def count_again() -> str:
        world.counter.before = None  # the instance whose call does not stop is lost all the same
        return COUNT

    world.counter.before = does_not_stop
    impatient = ToolsSettings(call_timeout_s=0.05, stop_timeout_s=0.05)
    world.tools.app = create_tools(impatient, tools=[world.counter], tracing=world.tracings["tools"])

    trajectory = await world.say(COUNT, count_again, ANSWER)
    ended.set()

    assert trajectory.error is None
    assert trajectory.turns[1].messages[-1].content == "count 1"
    assert [one.error for turn in trajectory.turns for one in turn.calls] == [ErrorCode.DEADLINE_EXCEEDED, None]


@pytest.mark.anyio
async def test_the_kwargs_of_the_row_reach_each_stage_of_the_tool(world: World) -> None:
    kwargs = {f"{stage}_kwargs": {stage: 1} for stage in ("create", "execute", "calc_reward", "release")}

    trajectory = await world.say(COUNT, ANSWER, sample__extra_info__tools_kwargs={"counter": kwargs})

    assert trajectory.error is None
    assert world.counter.given == [{"create": 1}, {"execute": 1}, {"calc_reward": 1}, {"release": 1}]


@pytest.mark.anyio
async def test_the_kwargs_of_the_row_reach_a_tool_without_state(world: World) -> None:
    world.counter.stateless = True
    kwargs = {f"{stage}_kwargs": {stage: 1} for stage in ("create", "execute", "calc_reward", "release")}

    await world.say(COUNT, ANSWER, sample__extra_info__tools_kwargs={"counter": kwargs})

    assert world.tools.paths == ["GET tools", "POST execute"]
    assert world.counter.given == [{"create": 1}, {"execute": 1}, {"calc_reward": 1}, {"release": 1}]
