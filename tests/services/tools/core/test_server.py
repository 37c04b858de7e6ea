import asyncio
import logging

import pytest

from tests.services.tools.faulty_tool import PreparedTool
from tests.services.tools.tool_harness import Make, ToolHarness
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.tools.base import ToolLimits
from trackway.tools.core.server import ToolServer
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import CreateInstance, ExecuteRequest, OneShotRequest


@pytest.mark.anyio
async def test_state_lives_from_creation_to_release(harness: ToolHarness) -> None:
    instance_id = await harness.made()

    assert [await harness.call(instance_id), await harness.call(instance_id)] == ["ok 1", "ok 2"]
    assert await harness.server.reward(instance_id) == 2.0
    await harness.server.release(instance_id)
    assert harness.faulty.calls == {}


@pytest.mark.anyio
async def test_a_tool_that_raises_fails_the_call_and_the_instance_stays_usable(
    harness: ToolHarness, caplog: pytest.LogCaptureFixture
) -> None:
    instance_id = await harness.made()

    with pytest.raises(TrackwayError) as caught, caplog.at_level(logging.ERROR, "trackway.tools"):
        await harness.call(instance_id, "raise")

    assert caught.value.code is ErrorCode.TOOL_FAILED
    assert caught.value.message == "tool 'faulty' failed in execute: ZeroDivisionError: asked to fail"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert await harness.call(instance_id) == "ok 1"


@pytest.mark.anyio
async def test_a_reward_that_json_cannot_carry_is_the_tools_failure(harness: ToolHarness) -> None:
    with pytest.raises(TrackwayError, match="expected finite rewards and metrics, got nan") as caught:
        await harness.call(await harness.made(), "nan")

    assert caught.value.code is ErrorCode.TOOL_FAILED


@ENDS_SOON
@pytest.mark.anyio
async def test_a_call_past_its_deadline_ends_and_the_instance_stays_usable(make_rig: Make) -> None:
    harness = make_rig(config={"call_timeout_s": 0.01}, call_timeout_s=1000.0)
    instance_id = await harness.made()

    with pytest.raises(TrackwayError, match=r"expected execute to end within 0\.01 s") as caught:
        await harness.call(instance_id, "sleep")

    assert caught.value.code is ErrorCode.TOOL_TIMEOUT
    assert harness.faulty.running == 0
    assert await harness.call(instance_id) == "ok 1"


@pytest.mark.anyio
async def test_calls_of_one_instance_run_one_after_another(harness: ToolHarness) -> None:
    instance_id = await harness.made()

    texts = await asyncio.gather(*(harness.call(instance_id) for _ in range(5)))

    assert texts == ["ok 1", "ok 2", "ok 3", "ok 4", "ok 5"]
    assert harness.faulty.most_running == 1


@pytest.mark.anyio
async def test_calls_of_several_instances_run_together_up_to_the_tools_limit(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=2)
    ids = [await harness.made() for _ in range(5)]
    harness.faulty.gate.clear()

    calls = [asyncio.create_task(harness.call(instance_id)) for instance_id in ids]
    await async_until(lambda: harness.faulty.running == 2)
    harness.faulty.gate.set()

    assert await asyncio.gather(*calls) == ["ok 1"] * 5
    assert harness.faulty.most_running == 2


@pytest.mark.anyio
async def test_runs_take_turns_at_a_tool_and_callers_without_a_trajectory_are_like_a_run(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=1)
    harness.faulty.gate.clear()
    trajectories = ["large/1/0/0", "large/1/1/0", "large/2/0/0", "large/val2/0/0", None, "t-2", "small/1/0/0"]
    ended: list[str | None] = []

    async def call(trajectory: str | None) -> None:
        await harness.call(made[trajectory])
        ended.append(trajectory)

    made = {trajectory: await harness.made(session_id=trajectory) for trajectory in trajectories}
    calls = []
    for trajectory in trajectories:
        calls.append(asyncio.create_task(call(trajectory)))
        await async_until(lambda: harness.faulty.running == 1)
    harness.faulty.gate.set()
    await asyncio.gather(*calls)

    assert ended == [
        "large/1/0/0",
        "large/1/1/0",
        None,
        "small/1/0/0",
        "large/2/0/0",
        "t-2",
        "large/val2/0/0",
    ]


@pytest.mark.anyio
async def test_runs_take_turns_at_a_stateless_tool(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=1)
    ended: list[str] = []

    async def call(trajectory: str) -> None:
        request = OneShotRequest(arguments={"mode": "ok"}, session_id=trajectory)
        await harness.server.one_shot("faulty", request)
        ended.append(trajectory)

    await asyncio.gather(*map(call, ["large/1/0/0", "large/1/1/0", "large/1/2/0", "small/1/0/0"]))

    assert ended[0] == "small/1/0/0"


@pytest.mark.anyio
async def test_a_call_that_finds_no_free_place_in_time_is_told_to_come_back(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=1, wait_timeout_s=0.01)
    first, second = await harness.made(), await harness.made()
    harness.faulty.gate.clear()
    running = asyncio.create_task(harness.call(first))
    await async_until(lambda: harness.faulty.running == 1)

    with pytest.raises(TrackwayError, match=r"tool 'faulty': expected a free place within 0\.01 s") as caught:
        await harness.call(second)
    harness.faulty.gate.set()

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.OVERLOADED, True)
    assert await running == "ok 1"


@pytest.mark.anyio
async def test_a_long_text_is_cut_with_a_marker(make_rig: Make) -> None:
    harness = make_rig(max_output_chars=40)

    assert await harness.call(await harness.made(), "long") == "x" * 40 + "[truncated 60 characters]"


@pytest.mark.anyio
async def test_idle_instances_are_reaped_and_then_not_found(harness: ToolHarness) -> None:
    idle, used = await harness.made(), await harness.made()
    harness.clock.now = 50.0
    await harness.call(used)
    harness.clock.now = 61.0

    assert await harness.server.reap() == 1

    assert list(harness.faulty.calls) == [used]
    with pytest.raises(TrackwayError, match="idle for more than 60 s") as caught:
        await harness.call(idle)
    assert caught.value.code is ErrorCode.INSTANCE_NOT_FOUND


@pytest.mark.anyio
async def test_a_full_server_reaps_before_it_refuses(make_rig: Make) -> None:
    harness = make_rig(max_instances=1)
    await harness.made()

    with pytest.raises(TrackwayError, match="fewer than 1 tool instances"):
        await harness.made()
    harness.clock.now = 61.0

    assert await harness.call(await harness.made()) == "ok 1"


@pytest.mark.anyio
async def test_a_failed_creation_takes_no_room(harness: ToolHarness) -> None:
    with pytest.raises(TrackwayError, match="tool 'faulty' failed in create: OSError: no room"):
        await harness.server.create(CreateInstance(tool="faulty", create_kwargs={"broken": True}))

    assert len(harness.table) == 0


@pytest.mark.anyio
async def test_a_release_that_fails_still_frees_the_instance(harness: ToolHarness) -> None:
    instance_id = await harness.made()
    harness.faulty.calls.clear()

    with pytest.raises(TrackwayError, match="tool 'faulty' failed in release: KeyError"):
        await harness.server.release(instance_id)

    assert len(harness.table) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["ok", "raise"])
async def test_a_one_shot_leaves_nothing_behind(harness: ToolHarness, mode: str) -> None:
    request = OneShotRequest(arguments={"mode": mode})

    if mode == "ok":
        result = await harness.server.one_shot("faulty", request)
        assert (result.text, result.reward, result.metrics, result.instance_reward) == ("ok 1", 0.5, {}, 1.0)
    else:
        with pytest.raises(TrackwayError, match="asked to fail"):
            await harness.server.one_shot("faulty", request)
    assert (len(harness.table), harness.faulty.calls) == (0, {})


@pytest.mark.anyio
async def test_closing_releases_everything(harness: ToolHarness) -> None:
    await harness.made()
    await harness.made("calculator")

    await harness.server.close()

    assert (len(harness.table), harness.faulty.calls) == (0, {})


@pytest.mark.anyio
async def test_the_calculator_answers_and_explains_a_wrong_expression(harness: ToolHarness) -> None:
    instance_id = await harness.made("calculator")

    right = await harness.server.execute(instance_id, ExecuteRequest(arguments={"expression": "84/4"}))
    with pytest.raises(TrackwayError) as caught:
        await harness.server.execute(instance_id, ExecuteRequest(arguments={"expression": "3/0"}))

    assert right.text == "21"
    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID_REQUEST, "division by zero in '3/0'")


@pytest.mark.anyio
async def test_tools_start_in_order_and_close_in_reverse(make_rig: Make) -> None:
    heard: list[str] = []
    server = ToolServer([PreparedTool("first", heard), PreparedTool("second", heard)], ToolLimits(), make_rig().table)

    await server.start()
    await server.close()

    assert heard == ["start first", "start second", "close second", "close first"]


@pytest.mark.anyio
async def test_a_tool_that_cannot_start_keeps_the_server_from_starting(make_rig: Make) -> None:
    heard: list[str] = []
    tools = [PreparedTool("first", heard), PreparedTool("second", heard, broken=True), PreparedTool("third", heard)]
    server = ToolServer(tools, ToolLimits(), make_rig().table)

    with pytest.raises(OSError, match="second has no index"):
        await server.start()

    assert heard == ["start first", "start second", "close second", "close first"]
