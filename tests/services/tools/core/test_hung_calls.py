"""What a tool does at its worst, and what its instance and its server are worth afterwards."""

import asyncio

import pytest

from tests.services.tools.tool_harness import Make, ToolHarness
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import OneShotRequest

pytestmark = [pytest.mark.anyio, ENDS_SOON]

BRIEF = {"call_timeout_s": 0.02, "stop_timeout_s": 0.02}


async def refused(harness: ToolHarness, instance_id: str, mode: str) -> TrackwayError:
    with pytest.raises(TrackwayError) as caught:
        await harness.call(instance_id, mode)
    return caught.value


async def test_a_call_that_does_not_stop_is_answered_and_its_instance_is_lost_until_it_does(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=2, **BRIEF)
    stuck, healthy = await harness.made(), await harness.made()

    late = await refused(harness, stuck, "block")
    lost = await refused(harness, stuck, "ok")
    (state,) = [
        instance.state for instance in harness.server.instances(None, 9).instances if instance.instance_id == stuck
    ]
    meanwhile = await harness.call(healthy)
    harness.faulty.unblock.set()
    await async_until(lambda: len(harness.table) == 1)
    gone = await refused(harness, stuck, "ok")

    assert [error.code for error in (late, lost, gone)] == [
        ErrorCode.TOOL_TIMEOUT,
        ErrorCode.INSTANCE_LOST,
        ErrorCode.INSTANCE_NOT_FOUND,
    ]
    assert (state, meanwhile) == ("stuck", "ok 1")
    await async_until(lambda: list(harness.faulty.calls) == [healthy])


async def test_a_call_that_does_not_stop_keeps_its_place_and_no_other_one(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=1, wait_timeout_s=0.02, **BRIEF)
    stuck, healthy = await harness.made(), await harness.made()

    await refused(harness, stuck, "block")
    full = await refused(harness, healthy, "ok")
    harness.faulty.unblock.set()
    await async_until(lambda: len(harness.table) == 1)

    assert full.code is ErrorCode.OVERLOADED
    assert await harness.call(healthy) == "ok 1"


async def test_a_caller_who_leaves_a_call_that_does_not_stop_loses_the_instance_too(make_rig: Make) -> None:
    harness = make_rig(stop_timeout_s=0.02)
    instance_id = await harness.made()
    leaving = asyncio.create_task(harness.call(instance_id, "block"))
    await async_until(lambda: harness.faulty.running == 1)

    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    lost = await refused(harness, instance_id, "ok")
    harness.faulty.unblock.set()
    await async_until(lambda: harness.faulty.calls == {})

    assert (leaving.cancelled(), lost.code, len(harness.table)) == (True, ErrorCode.INSTANCE_LOST, 0)


async def test_a_one_shot_that_does_not_stop_leaves_nothing_behind_in_the_end(make_rig: Make) -> None:
    harness = make_rig(**BRIEF)

    with pytest.raises(TrackwayError, match="expected execute to end within"):
        await harness.server.one_shot("faulty", OneShotRequest(arguments={"mode": "block"}))
    harness.faulty.unblock.set()

    await async_until(lambda: (len(harness.table), harness.faulty.calls) == (0, {}))


@pytest.mark.parametrize(("mode", "reason"), [("exit", "it called sys.exit(3)"), ("cancel", "it cancelled itself")])
async def test_a_tool_that_would_end_more_than_its_call_only_fails(
    harness: ToolHarness, mode: str, reason: str
) -> None:
    instance_id = await harness.made()

    failed = await refused(harness, instance_id, mode)

    assert (failed.code, failed.message) == (ErrorCode.TOOL_FAILED, f"tool 'faulty' failed in execute: {reason}")
    assert await harness.call(instance_id) == "ok 1"


async def test_a_release_waits_for_no_place_and_goes_on_when_its_caller_leaves(make_rig: Make) -> None:
    harness = make_rig(tool_concurrency=1)
    busy, idle = await harness.made(), await harness.made()
    harness.faulty.gate.clear()
    running = asyncio.create_task(harness.call(busy))
    await async_until(lambda: harness.faulty.running == 1)

    releasing = asyncio.create_task(harness.server.release(idle))
    await async_until(lambda: "release" in harness.faulty.given)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    harness.faulty.gate.set()

    await async_until(lambda: idle not in harness.faulty.calls)
    assert await running == "ok 1"
