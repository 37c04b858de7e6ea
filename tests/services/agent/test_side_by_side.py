"""The calls of one turn: which run at the same time, in which order they are seen, and what ends them."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.services.agent.agent_services import AgentServices, call, group
from tests.services.agent.scripted_model import END
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.agent.toolbox import Toolbox, ToolSet
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tools.base import ToolInputError
from trackway.wire.errors import ErrorCode

pytestmark = pytest.mark.slow

ANSWER = "#### 18" + END


@pytest.mark.anyio
async def test_calls_of_one_turn_run_side_by_side_and_keep_their_order(services: AgentServices) -> None:
    services.other_tool.text = "other"
    second_has_run = asyncio.Event()
    services.counter.before = second_has_run.wait  # hangs when the second call waits for the first

    async def tell() -> None:
        second_has_run.set()

    services.other_tool.before = tell
    trajectory = await services.say(
        call("counter") + call("other") + END, ANSWER, limits__max_parallel_calls=2, limits__timeout_s=10
    )

    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1", "other"]


@pytest.mark.anyio
async def test_calls_beyond_the_limit_are_told_that_they_were_not_run(services: AgentServices) -> None:
    trajectory = await services.say(call("counter") + call("other") + END, ANSWER)

    told = "The call of 'other' was not run: at most 1 tool call(s) run in one turn."
    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1", told]
    assert (trajectory.tool_rewards, services.other_tool.counts) == ([0.25], {})


@pytest.mark.anyio
async def test_calls_of_one_instance_run_in_the_order_of_the_text(services: AgentServices) -> None:
    said = "".join(call("counter", arguments) for arguments in ("{}", '{"refuse": true}', "{}")) + END

    trajectory = await services.say(said, ANSWER, limits__max_parallel_calls=3)

    told = [message.content for message in trajectory.turns[0].messages[1:]]
    assert told == ["count 1", "Error executing tool 'counter': expected no refuse, got one", "count 3"]


def given_back(services: AgentServices) -> int:
    """Requests for a release so far."""
    return sum(path.startswith("DELETE ") for path in services.tools.paths)


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
async def test_calls_of_one_tool_run_side_by_side_when_it_keeps_no_state(services: AgentServices) -> None:
    services.counter.stateless = True
    services.counter.before = meeting(3)

    trajectory = await services.say(
        call("counter") * 3 + END, ANSWER, limits__max_parallel_calls=3, limits__timeout_s=10
    )

    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1"] * 3


@pytest.mark.anyio
async def test_calls_of_one_instance_never_overlap_while_another_tool_runs(services: AgentServices) -> None:
    others_turn = meeting(2)
    sent: list[int] = []

    async def alone() -> None:
        await others_turn()  # the other tool is in its call too
        sent.append(services.tools.paths.count("POST execute"))

    services.counter.before, services.other_tool.before = alone, others_turn
    said = call("counter") + call("counter") + call("other") + END

    trajectory = await services.say(said, ANSWER, limits__max_parallel_calls=3, limits__timeout_s=10)

    assert sent == [2, 3]  # the second call only when the first had its answer
    assert [message.content for message in trajectory.turns[0].messages[1:]] == ["count 1", "count 2", "count 1"]
    assert [call.tool_call_id for call in trajectory.turns[0].calls] == ["call00000", "call00001", "call00002"]


@pytest.mark.anyio
async def test_a_failing_tool_server_does_not_wait_for_the_calls_beside(services: AgentServices) -> None:
    begun = asyncio.Event()

    async def outlives_the_turn() -> None:
        begun.set()
        await async_until(lambda: given_back(services) > 0)

    async def refuse(instance_id: str) -> None:
        await begun.wait()
        raise ToolInputError("expected a row of another kind")

    services.counter.before = outlives_the_turn
    services.other_tool.create = refuse  # pyright: ignore[reportAttributeAccessIssue]

    trajectory = await services.say(call("counter") + call("other") + END, ANSWER, limits__max_parallel_calls=2)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert [(call.tool, call.error) for call in trajectory.turns[0].calls] == [("other", ErrorCode.INVALID_REQUEST)]
    assert len(services.counter.released) == 1


@ENDS_SOON
@pytest.mark.anyio
async def test_a_call_that_the_time_limit_cut_off_leaves_a_record(services: AgentServices) -> None:
    services.counter.before = lambda: async_until(lambda: given_back(services) > 0)

    trajectory = await services.say(call("counter") + END, limits__timeout_s=2)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.DEADLINE_EXCEEDED
    [cut_off] = trajectory.turns[0].calls
    assert (cut_off.tool, cut_off.error, cut_off.reward) == ("counter", ErrorCode.DEADLINE_EXCEEDED, 0.0)
    assert 0 < cut_off.seconds <= trajectory.turns[0].tools_s <= trajectory.timings.total


@pytest.mark.anyio
async def test_cancelling_ends_every_call_of_the_turn_and_keeps_what_came_before(services: AgentServices) -> None:
    slow_ones_run = meeting(3)

    async def outlives_the_turn() -> None:
        await slow_ones_run()
        await async_until(lambda: given_back(services) == 2)

    async def first_at_once() -> None:
        services.counter.before = outlives_the_turn

    services.counter.before, services.other_tool.before = first_at_once, outlives_the_turn
    calls = {f"call_0_{place}": ParsedCall(name) for place, name in enumerate(["counter", "counter", "other"])}
    offer = ToolSet([services.counter.tool_schema, services.other_tool.tool_schema])
    async with httpx.AsyncClient(transport=services.tools) as http:
        client = ToolsClient("http://tools", http)
        toolbox = Toolbox(client, group().sample, "run-a/1/7/0", Deadline.after(60), release_timeout_s=5)
        answering = asyncio.create_task(toolbox.answer(calls, offer, 3))
        await slow_ones_run()
        answering.cancel()
        await asyncio.wait([answering])
        await toolbox.release()

    assert answering.cancelled()
    assert [(record.tool_call_id, record.error) for record in toolbox.records] == [("call_0_0", None)]
    assert (len(services.counter.released), len(services.other_tool.released)) == (1, 1)
