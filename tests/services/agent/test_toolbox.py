"""Calls side by side, and what happens when the infrastructure around them fails."""

import asyncio
import logging

import httpx
import pytest
from agent_world import World, call, group
from scripted_model import END

from trackway.agent.catalog import Offer
from trackway.agent.toolbox import Toolbox
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

ANSWER = "#### 18" + END
COUNT = call("counter") + END


@pytest.mark.anyio
async def test_calls_of_one_turn_run_side_by_side_and_keep_their_order(world: World) -> None:
    world.other.text = "other"
    second_has_run = asyncio.Event()
    world.counter.before = second_has_run.wait  # hangs when the second call waits for the first

    async def tell() -> None:
        second_has_run.set()

    world.other.before = tell
    trajectory = await world.say(
        call("counter") + call("other") + END, ANSWER, limits__max_parallel_calls=2, limits__timeout_s=10
    )

    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1", "other"]


@pytest.mark.anyio
async def test_calls_beyond_the_limit_are_told_that_they_were_not_run(world: World) -> None:
    trajectory = await world.say(call("counter") + call("other") + END, ANSWER)

    told = "The call of 'other' was not run: at most 1 tool call(s) run in one turn."
    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1", told]
    assert (trajectory.tool_rewards, world.other.counts) == ([0.25], {})


@pytest.mark.anyio
async def test_calls_of_one_instance_run_in_the_order_of_the_text(world: World) -> None:
    said = "".join(call("counter", arguments) for arguments in ("{}", '{"refuse": true}', "{}")) + END

    trajectory = await world.say(said, ANSWER, limits__max_parallel_calls=3)

    told = [message.content for message in trajectory.turns[0].messages[1:]]
    assert told == ["count 1", "Error executing tool 'counter': expected no refuse, got one", "count 3"]


@pytest.mark.anyio
async def test_a_tool_server_that_goes_down_ends_only_the_trajectories_that_need_it(world: World) -> None:
    async def count_without_tools() -> str:
        world.tools.app = None
        return COUNT

    world.model.scripts = {0: [count_without_tools], 1: [ANSWER]}
    failed, fine = await world.run(group(n=2))

    assert failed.error is not None
    assert (failed.stop_reason, failed.error.code) == (StopReason.ERROR, ErrorCode.UNAVAILABLE)
    assert failed.response_mask == [1] * len(world.model.encode(COUNT))  # nothing of it came into the context
    assert (failed.reward, len(failed.turns)) == (None, 1)
    assert fine.reward is not None and fine.reward.score == 1.0


@pytest.mark.anyio
async def test_a_refused_connection_is_an_error_of_the_trajectory(world: World) -> None:
    closed = httpx.AsyncHTTPTransport()
    world.tools.app = None
    world.tools.handle_async_request = closed.handle_async_request  # a real connection to a name without an address

    trajectory = await world.say(ANSWER)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.UNAVAILABLE
    await closed.aclose()


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
async def test_a_call_that_exceeds_the_tools_own_limit_is_told_to_the_model(world: World) -> None:
    world.slow_tool_server(call_timeout_s=0.05)

    trajectory = await world.say(COUNT, ANSWER)

    assert trajectory.error is None
    told = trajectory.turns[0].messages[-1].content
    assert told.startswith("Error executing tool 'counter': tool 'counter': expected execute to end within 0.05 s")


@pytest.mark.anyio
async def test_a_reward_service_that_is_down_is_an_error_and_the_tools_are_released(world: World) -> None:
    world.reward.app = None

    trajectory = await world.say(COUNT, ANSWER)

    assert trajectory.error is not None
    assert (trajectory.stop_reason, trajectory.error.code) == (StopReason.ERROR, ErrorCode.UNAVAILABLE)
    assert len(world.counter.released) == 1


@pytest.mark.anyio
async def test_the_time_limit_ends_a_trajectory_and_releases_its_tools(world: World) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    trajectory = await world.say(COUNT, never, limits__timeout_s=0.3)

    assert trajectory.error is not None
    assert (trajectory.stop_reason, trajectory.error.code) == (StopReason.ERROR, ErrorCode.DEADLINE_EXCEEDED)
    assert len(trajectory.turns) == 1
    assert len(world.counter.released) == 1
    assert 0.3 <= trajectory.timings.total < 3


@pytest.mark.anyio
async def test_a_release_that_fails_is_logged_and_spoils_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(instance_id: str) -> None:
        raise RuntimeError("cannot let go")

    world.counter.release = refuse  # pyright: ignore[reportAttributeAccessIssue]
    with caplog.at_level(logging.WARNING, "trackway.agent"):
        trajectory = await world.say(COUNT, ANSWER)

    assert trajectory.error is None
    assert "run-a/1/7/0: counter was not given back" in caplog.text


@pytest.mark.anyio
async def test_a_tool_without_state_is_called_without_an_instance(world: World) -> None:
    good, bad = '{"expression": "(84 + 16) / 4"}', '{"expression": "two"}'

    trajectory = await world.say(call("calculator", good) + END, call("calculator", bad) + END, ANSWER)

    [value, refusal] = [turn.messages[1].content for turn in trajectory.turns[:2]]
    assert value == "25"
    assert refusal.startswith("Error executing tool 'calculator': ")
    assert world.tools.paths == ["GET tools", "POST execute", "POST execute"]


@pytest.mark.anyio
async def test_the_tools_are_listed_once_for_a_whole_group(world: World) -> None:
    world.model.scripts = {number: [ANSWER] for number in range(8)}

    await world.run(group(n=8))

    assert world.tools.paths.count("GET tools") == 1


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
        offer = Offer([world.counter.tool_schema])
        calling = asyncio.create_task(toolbox.answer({"call_0_0": ParsedCall("counter")}, offer, 1))
        await making.wait()
        calling.cancel()
        await asyncio.wait([calling])
        go_on.set()
        await toolbox.release()

    assert calling.cancelled()
    assert len(world.counter.released) == 1
