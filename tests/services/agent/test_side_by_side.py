"""The calls of one turn: which run at the same time, in which order they are seen, and what ends them."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from agent_world import World, call, group, until
from scripted_model import END
from time_limits import ENDS_SOON

from trackway.agent.catalog import ToolSet
from trackway.agent.toolbox import Toolbox
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tools.base import ToolInputError
from trackway.wire.errors import ErrorCode

ANSWER = "#### 18" + END


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


def given_back(world: World) -> int:
    """Requests for a release so far."""
    return sum(path.startswith("DELETE ") for path in world.tools.paths)


def meeting(parties: int) -> Callable[[], Awaitable[None]]:
    """To be waited for by so many calls at the same time; hangs when they come one after another."""
    came, all_came = [], asyncio.Event()

    async def meet() -> None:
        came.append(None)
        if len(came) == parties:
            all_came.set()
        await all_came.wait()

    return meet


@pytest.mark.anyio
async def test_calls_of_one_tool_run_side_by_side_when_it_keeps_no_state(world: World) -> None:
    world.counter.stateless = True
    world.counter.before = meeting(3)

    trajectory = await world.say(call("counter") * 3 + END, ANSWER, limits__max_parallel_calls=3, limits__timeout_s=10)

    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1"] * 3


@pytest.mark.anyio
async def test_calls_of_one_instance_never_overlap_while_another_tool_runs(world: World) -> None:
    others_turn = meeting(2)
    sent: list[int] = []

    async def alone() -> None:
        await others_turn()  # the other tool is in its call too
        sent.append(world.tools.paths.count("POST execute"))

    world.counter.before, world.other.before = alone, others_turn
    said = call("counter") + call("counter") + call("other") + END

    trajectory = await world.say(said, ANSWER, limits__max_parallel_calls=3, limits__timeout_s=10)

    assert sent == [2, 3]  # the second call only when the first had its answer
    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1", "count 2", "count 1"]
    assert [one.tool_call_id for one in trajectory.turns[0].calls] == ["call_0_0", "call_0_1", "call_0_2"]


@pytest.mark.anyio
async def test_a_failing_tool_server_does_not_wait_for_the_calls_beside(world: World) -> None:
    begun = asyncio.Event()

    async def outlives_the_turn() -> None:
        begun.set()
        await until(lambda: given_back(world) > 0)

    async def refuse(instance_id: str) -> None:
        await begun.wait()
        raise ToolInputError("expected a row of another kind")

    world.counter.before = outlives_the_turn
    world.other.create = refuse  # pyright: ignore[reportAttributeAccessIssue]

    trajectory = await world.say(call("counter") + call("other") + END, ANSWER, limits__max_parallel_calls=2)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert [(one.tool, one.error) for one in trajectory.turns[0].calls] == [("other", ErrorCode.INVALID_REQUEST)]
    assert len(world.counter.released) == 1


@ENDS_SOON
@pytest.mark.anyio
async def test_a_call_that_the_time_limit_cut_off_leaves_a_record(world: World) -> None:
    world.counter.before = lambda: until(lambda: given_back(world) > 0)

    trajectory = await world.say(call("counter") + END, limits__timeout_s=2)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.DEADLINE_EXCEEDED
    [cut_off] = trajectory.turns[0].calls
    assert (cut_off.tool, cut_off.error, cut_off.reward) == ("counter", ErrorCode.DEADLINE_EXCEEDED, 0.0)
    assert 0 < cut_off.seconds <= trajectory.turns[0].tools_s <= trajectory.timings.total


@pytest.mark.anyio
async def test_cancelling_ends_every_call_of_the_turn_and_keeps_what_came_before(world: World) -> None:
    slow_ones_run = meeting(3)

    async def outlives_the_turn() -> None:
        await slow_ones_run()
        await until(lambda: given_back(world) == 2)

    async def first_at_once() -> None:
        world.counter.before = outlives_the_turn

    world.counter.before, world.other.before = first_at_once, outlives_the_turn
    calls = {f"call_0_{place}": ParsedCall(name) for place, name in enumerate(["counter", "counter", "other"])}
    offer = ToolSet([world.counter.tool_schema, world.other.tool_schema])
    async with httpx.AsyncClient(transport=world.tools) as http:
        client = ToolsClient("http://tools", http)
        toolbox = Toolbox(client, group().sample, "run-a/1/7/0", Deadline.after(60), release_timeout_s=5)
        answering = asyncio.create_task(toolbox.answer(calls, offer, 3))
        await slow_ones_run()
        answering.cancel()
        await asyncio.wait([answering])
        await toolbox.release()

    assert answering.cancelled()
    assert [(one.tool_call_id, one.error) for one in toolbox.records] == [("call_0_0", None)]
    assert (len(world.counter.released), len(world.other.released)) == (1, 1)
