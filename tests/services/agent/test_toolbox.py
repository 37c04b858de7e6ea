"""What happens to a trajectory when the infrastructure around its tools fails."""

import asyncio
import logging

import httpx
import pytest

from tests.services.agent.agent_services import AgentServices, call, group
from tests.services.agent.scripted_model import END
from tests.time_limits import ENDS_SOON
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import StopReason

pytestmark = pytest.mark.slow

ANSWER = "#### 18" + END
COUNT = call("counter") + END


@pytest.mark.anyio
async def test_a_tool_server_that_goes_down_ends_only_the_trajectories_that_need_it(services: AgentServices) -> None:
    async def count_without_tools() -> str:
        services.tools.app = None
        return COUNT

    services.model.scripts = {0: [count_without_tools], 1: [ANSWER]}
    failed, fine = await services.run(group(n=2))

    assert failed.error is not None
    assert (failed.stop_reason, failed.error.code) == (StopReason.ERROR, ErrorCode.UNAVAILABLE)
    assert failed.response_mask == [1] * len(services.model.encode(COUNT))  # nothing of it came into the context
    assert (failed.reward, len(failed.turns)) == (None, 1)
    assert fine.reward is not None and fine.reward.score == 1.0


@pytest.mark.anyio
async def test_a_refused_connection_is_an_error_of_the_trajectory(services: AgentServices) -> None:
    closed = httpx.AsyncHTTPTransport()
    services.tools.app = None
    services.tools.handle_async_request = closed.handle_async_request  # a real connection to a name without an address

    trajectory = await services.say(ANSWER)

    assert trajectory.error is not None
    assert trajectory.error.code is ErrorCode.UNAVAILABLE
    await closed.aclose()


@ENDS_SOON
@pytest.mark.anyio
async def test_a_call_that_exceeds_the_tools_own_limit_is_told_to_the_model(services: AgentServices) -> None:
    services.slow_tool_server(call_timeout_s=0.05)

    trajectory = await services.say(COUNT, ANSWER)

    assert trajectory.error is None
    told = trajectory.turns[0].messages[-1].content
    assert told.startswith("Error executing tool 'counter': tool 'counter': expected execute to end within 0.05 s")
    assert [call.error for call in trajectory.turns[0].calls] == [ErrorCode.TOOL_TIMEOUT]


@pytest.mark.anyio
async def test_a_reward_service_that_is_down_is_an_error_and_the_tools_are_released(services: AgentServices) -> None:
    services.reward.app = None

    trajectory = await services.say(COUNT, ANSWER)

    assert trajectory.error is not None
    assert (trajectory.stop_reason, trajectory.error.code) == (StopReason.ERROR, ErrorCode.UNAVAILABLE)
    assert len(services.counter.released) == 1


@ENDS_SOON
@pytest.mark.anyio
async def test_the_time_limit_ends_a_trajectory_and_releases_its_tools(services: AgentServices) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    trajectory = await services.say(COUNT, never, limits__timeout_s=2.0)

    assert trajectory.error is not None
    assert (trajectory.stop_reason, trajectory.error.code) == (StopReason.ERROR, ErrorCode.DEADLINE_EXCEEDED)
    assert len(trajectory.turns) == 1
    assert len(services.counter.released) == 1
    assert 2.0 <= trajectory.timings.total < 10


@pytest.mark.anyio
async def test_a_release_that_fails_is_logged_and_spoils_nothing(
    services: AgentServices, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(instance_id: str) -> None:
        raise RuntimeError("cannot let go")

    services.counter.release = refuse  # pyright: ignore[reportAttributeAccessIssue]
    with caplog.at_level(logging.WARNING, "trackway.agent"):
        trajectory = await services.say(COUNT, ANSWER)

    assert trajectory.error is None
    assert "run-a/1/7/0: counter was not released" in caplog.text


@pytest.mark.anyio
async def test_a_tool_without_state_is_called_without_an_instance(services: AgentServices) -> None:
    good, bad = '{"expression": "(84 + 16) / 4"}', '{"expression": "two"}'

    trajectory = await services.say(call("calculator", good) + END, call("calculator", bad) + END, ANSWER)

    [value, refusal] = [turn.messages[1].content for turn in trajectory.turns[:2]]
    assert value == "25"
    assert refusal.startswith("Error executing tool 'calculator': ")
    assert services.tools.paths == ["GET tools", "POST execute", "POST execute"]


@pytest.mark.anyio
async def test_the_tools_are_listed_once_for_a_whole_group(services: AgentServices) -> None:
    services.model.scripts = {number: [ANSWER] for number in range(8)}

    await services.run(group(n=8))

    assert services.tools.paths.count("GET tools") == 1
