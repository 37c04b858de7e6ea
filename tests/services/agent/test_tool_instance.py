"""A tool's instance over a trajectory: made, lost, made anew, given back; every way ends in success or an error."""

import asyncio
from contextlib import suppress

import httpx
import pytest

from tests.services.agent.agent_services import AgentServices, call, group
from tests.services.agent.replaceable import Answer, breaks
from tests.services.agent.scripted_model import END
from tests.time_limits import ENDS_SOON
from trackway.agent.toolbox import Toolbox, ToolSet
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tools.app import create_app as create_tools
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

pytestmark = pytest.mark.slow

ANSWER = "#### 18" + END
COUNT = call("counter") + END


@pytest.mark.anyio
async def test_a_lost_instance_is_made_anew_and_its_calls_are_replayed(services: AgentServices) -> None:
    async def count_on_a_new_replica() -> str:
        services.new_tool_server()
        return COUNT

    refused = call("counter", '{"refuse": true}') + END
    trajectory = await services.say(COUNT, refused, count_on_a_new_replica, ANSWER)

    assert trajectory.error is None
    assert trajectory.turns[2].messages[-1].content == "count 3"
    assert trajectory.tool_rewards == [0.25, 0.0, 0.25]
    assert list(services.counter.counts.values()) == [3]
    assert services.counter.released == list(services.counter.counts)


@pytest.mark.anyio
async def test_two_calls_that_meet_a_lost_instance_share_its_recovery(services: AgentServices) -> None:
    async def count_twice_on_a_new_replica() -> str:
        services.new_tool_server()
        return call("counter") + COUNT

    trajectory = await services.say(COUNT, count_twice_on_a_new_replica, ANSWER, limits__max_parallel_calls=2)

    assert [message.content for message in trajectory.turns[1].messages[1:]] == ["count 2", "count 3"]


@pytest.mark.anyio
async def test_an_instance_lost_before_its_reward_is_replayed_too(services: AgentServices) -> None:
    async def answer_on_a_new_replica() -> str:
        services.new_tool_server()
        return ANSWER

    trajectory = await services.say(COUNT, answer_on_a_new_replica)

    assert trajectory.reward is not None
    assert trajectory.reward.components["tool/counter"] == 1.0


@pytest.mark.anyio
async def test_an_instance_that_is_lost_twice_ends_the_trajectory(services: AgentServices) -> None:
    async def count_on_a_new_replica() -> str:
        services.new_tool_server()
        return COUNT

    trajectory = await services.say(COUNT, count_on_a_new_replica, count_on_a_new_replica)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INSTANCE_LOST
    assert len(trajectory.turns) == 3


@pytest.mark.anyio
async def test_a_row_without_what_its_tool_needs_is_an_error_and_not_the_models_fault(services: AgentServices) -> None:
    said = call("calc_gsm8k_reward", '{"answer": "18"}') + END

    trajectory = await services.say(said, sample__extra_info__tools_kwargs={})

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INVALID_REQUEST
    assert "create_kwargs.ground_truth" in trajectory.error.message


@pytest.mark.anyio
async def test_an_instance_whose_making_was_interrupted_is_released(services: AgentServices) -> None:
    making, go_on = asyncio.Event(), asyncio.Event()

    async def slow_create(instance_id: str) -> None:
        making.set()
        await go_on.wait()

    services.counter.create = slow_create  # pyright: ignore[reportAttributeAccessIssue]
    async with httpx.AsyncClient(transport=services.tools) as http:
        client = ToolsClient("http://tools", http)
        toolbox = Toolbox(client, group().sample, "run-a/1/7/0", Deadline.after(60), release_timeout_s=5)
        offer = ToolSet([services.counter.tool_schema])
        calling = asyncio.create_task(toolbox.answer({"call_0_0": ParsedCall("counter")}, offer, 1))
        await making.wait()
        calling.cancel()
        await asyncio.wait([calling])
        go_on.set()
        await toolbox.release()

    assert calling.cancelled()
    assert len(services.counter.released) == 1


@pytest.mark.anyio
async def test_an_instance_lost_again_before_its_reward_ends_the_trajectory(services: AgentServices) -> None:
    async def on_a_new_replica() -> str:
        services.new_tool_server()
        return COUNT

    async def answer_on_a_new_replica() -> str:
        services.new_tool_server()
        return ANSWER

    trajectory = await services.say(COUNT, on_a_new_replica, answer_on_a_new_replica)

    assert trajectory.error is not None
    assert (trajectory.error.code, trajectory.stop_reason) == (ErrorCode.INSTANCE_LOST, StopReason.ERROR)
    assert [[call.error for call in turn.calls] for turn in trajectory.turns] == [[None], [None], []]


@pytest.mark.anyio
async def test_an_instance_that_is_lost_while_it_is_replayed_ends_the_trajectory(services: AgentServices) -> None:
    async def lose_it_again() -> None:
        services.new_tool_server()

    async def count_on_a_new_replica() -> str:
        services.new_tool_server()
        services.counter.before = lose_it_again
        return COUNT

    trajectory = await services.say(COUNT, COUNT, count_on_a_new_replica)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.INSTANCE_LOST
    assert [call.error for call in trajectory.turns[2].calls] == [ErrorCode.INSTANCE_LOST]
    assert services.counter.counts == {}  # the third replica was not asked to make another


@pytest.mark.anyio
async def test_a_tool_server_that_is_gone_for_the_replay_ends_the_trajectory(services: AgentServices) -> None:
    async def pass_on(answer: Answer) -> httpx.Response:
        return await answer()

    async def count_on_a_new_replica() -> str:
        services.new_tool_server()
        services.tools.faults = [pass_on, *[breaks(httpx.ConnectError("connection refused"))] * 2]
        return COUNT

    trajectory = await services.say(COUNT, count_on_a_new_replica)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.UNAVAILABLE
    assert [call.error for call in trajectory.turns[1].calls] == [ErrorCode.UNAVAILABLE]


@ENDS_SOON
@pytest.mark.anyio
async def test_a_call_that_was_cut_off_is_not_replayed(services: AgentServices) -> None:
    ended = asyncio.Event()

    async def does_not_stop() -> None:
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await ended.wait()

    async def count_again() -> str:
        services.counter.before = None  # the instance whose call does not stop is lost all the same
        return COUNT

    services.counter.before = does_not_stop
    impatient = ToolsSettings(call_timeout_s=0.05, stop_timeout_s=0.05)
    services.tools.app = create_tools(impatient, tools=[services.counter], tracing=services.tracings["tools"])

    trajectory = await services.say(COUNT, count_again, ANSWER)
    ended.set()

    assert trajectory.error is None
    assert trajectory.turns[1].messages[-1].content == "count 1"
    assert [call.error for turn in trajectory.turns for call in turn.calls] == [ErrorCode.TOOL_TIMEOUT, None]


@pytest.mark.anyio
async def test_the_kwargs_of_the_row_reach_each_stage_of_the_tool(services: AgentServices) -> None:
    kwargs = {f"{stage}_kwargs": {stage: 1} for stage in ("create", "execute", "calc_reward", "release")}

    trajectory = await services.say(COUNT, ANSWER, sample__extra_info__tools_kwargs={"counter": kwargs})

    assert trajectory.error is None
    assert services.counter.given == [{"create": 1}, {"execute": 1}, {"calc_reward": 1}, {"release": 1}]


@pytest.mark.anyio
async def test_the_kwargs_of_the_row_reach_a_tool_without_state(services: AgentServices) -> None:
    services.counter.stateless = True
    kwargs = {f"{stage}_kwargs": {stage: 1} for stage in ("create", "execute", "calc_reward", "release")}

    await services.say(COUNT, ANSWER, sample__extra_info__tools_kwargs={"counter": kwargs})

    assert services.tools.paths == ["GET tools", "POST execute"]
    assert services.counter.given == [{"create": 1}, {"execute": 1}, {"calc_reward": 1}, {"release": 1}]
