"""What a tool does at its worst, and what its instance and its server are worth afterwards."""

import asyncio

import pytest
from time_limits import ENDS_SOON
from tools_rig import Make, Rig, eventually

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import OneShotRequest

pytestmark = [pytest.mark.anyio, ENDS_SOON]

BRIEF = {"call_timeout_s": 0.02, "stop_timeout_s": 0.02}


async def refused(rig: Rig, instance_id: str, mode: str) -> TrackwayError:
    with pytest.raises(TrackwayError) as caught:
        await rig.call(instance_id, mode)
    return caught.value


async def test_a_call_that_does_not_stop_is_answered_and_its_instance_is_lost_until_it_does(make_rig: Make) -> None:
    rig = make_rig(tool_concurrency=2, **BRIEF)
    stuck, other = await rig.made(), await rig.made()

    late = await refused(rig, stuck, "block")
    lost = await refused(rig, stuck, "ok")
    (state,) = [one.state for one in rig.server.instances(None, 9).instances if one.instance_id == stuck]
    meanwhile = await rig.call(other)
    rig.faulty.unblock.set()
    await eventually(lambda: len(rig.table) == 1)
    gone = await refused(rig, stuck, "ok")

    assert [one.code for one in (late, lost, gone)] == [
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.INSTANCE_LOST,
        ErrorCode.INSTANCE_NOT_FOUND,
    ]
    assert (state, meanwhile) == ("stuck", "ok 1")
    await eventually(lambda: list(rig.faulty.calls) == [other])


async def test_a_call_that_does_not_stop_keeps_its_place_and_no_other_one(make_rig: Make) -> None:
    rig = make_rig(tool_concurrency=1, wait_timeout_s=0.02, **BRIEF)
    stuck, other = await rig.made(), await rig.made()

    await refused(rig, stuck, "block")
    full = await refused(rig, other, "ok")
    rig.faulty.unblock.set()
    await eventually(lambda: len(rig.table) == 1)

    assert full.code is ErrorCode.OVERLOADED
    assert await rig.call(other) == "ok 1"


async def test_a_caller_who_leaves_a_call_that_does_not_stop_loses_the_instance_too(make_rig: Make) -> None:
    rig = make_rig(stop_timeout_s=0.02)
    instance_id = await rig.made()
    leaving = asyncio.create_task(rig.call(instance_id, "block"))
    await eventually(lambda: rig.faulty.running == 1)

    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    lost = await refused(rig, instance_id, "ok")
    rig.faulty.unblock.set()
    await eventually(lambda: rig.faulty.calls == {})

    assert (leaving.cancelled(), lost.code, len(rig.table)) == (True, ErrorCode.INSTANCE_LOST, 0)


async def test_a_one_shot_that_does_not_stop_leaves_nothing_behind_in_the_end(make_rig: Make) -> None:
    rig = make_rig(**BRIEF)

    with pytest.raises(TrackwayError, match="expected execute to end within"):
        await rig.server.one_shot("faulty", OneShotRequest(arguments={"mode": "block"}))
    rig.faulty.unblock.set()

    await eventually(lambda: (len(rig.table), rig.faulty.calls) == (0, {}))


@pytest.mark.parametrize(("mode", "reason"), [("exit", "it called sys.exit(3)"), ("cancel", "it cancelled itself")])
async def test_a_tool_that_would_end_more_than_its_call_only_fails(rig: Rig, mode: str, reason: str) -> None:
    instance_id = await rig.made()

    failed = await refused(rig, instance_id, mode)

    assert (failed.code, failed.message) == (ErrorCode.TOOL_FAILED, f"tool 'faulty' failed in execute: {reason}")
    assert await rig.call(instance_id) == "ok 1"


async def test_a_release_waits_for_no_place_and_goes_on_when_its_caller_leaves(make_rig: Make) -> None:
    rig = make_rig(tool_concurrency=1)
    busy, idle = await rig.made(), await rig.made()
    rig.faulty.gate.clear()
    running = asyncio.create_task(rig.call(busy))
    await eventually(lambda: rig.faulty.running == 1)

    releasing = asyncio.create_task(rig.server.release(idle))
    await eventually(lambda: "release" in rig.faulty.given)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    rig.faulty.gate.set()

    await eventually(lambda: idle not in rig.faulty.calls)
    assert await running == "ok 1"
