import asyncio
import uuid

import pytest

from tests.services.tools.tool_harness import FakeClock
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.core.instances import TRANSITIONS, Event, Instance, InstanceTable, State
from trackway.wire.errors import ErrorCode, TrackwayError


def table_of(clock: FakeClock | None = None, max_instances: int = 2) -> InstanceTable:
    return InstanceTable("replica0", max_instances, ttl_s=60.0, clock=clock or FakeClock())


def alive(table: InstanceTable, run: str = "run") -> Instance:
    instance = table.add(CalculatorTool.default(), f"{run}/1/0/0", run)
    table.created(instance)
    return instance


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_an_instance_takes_only_the_steps_of_the_table(state: State, event: Event) -> None:
    instance = Instance("id", CalculatorTool.default(), None, "", made_at=0.0, used_at=0.0, state=state)

    if (state, event) in TRANSITIONS:
        instance.move(event)
        assert instance.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(TrackwayError, match="expected a state from which"):
            instance.move(event)
        assert instance.state is state


@pytest.mark.anyio
async def test_a_released_instance_is_not_found_and_nothing_leads_on_from_it() -> None:
    table = table_of()
    instance = alive(table)

    await table.retire(instance, 1.0)

    assert instance.state is State.RELEASED
    assert not any(state is State.RELEASED for state, _ in TRANSITIONS)
    with pytest.raises(TrackwayError) as caught:
        table.get(instance.id)
    assert caught.value.code is ErrorCode.INSTANCE_NOT_FOUND


@pytest.mark.parametrize(
    ("instance_id", "code"),
    [
        (f"replica1-01234567-{uuid.uuid4().hex}", ErrorCode.INSTANCE_LOST),
        (f"replica1-01234567-{uuid.uuid4().hex}0", ErrorCode.INSTANCE_NOT_FOUND),
        ("../etc", ErrorCode.INSTANCE_NOT_FOUND),
        ("", ErrorCode.INSTANCE_NOT_FOUND),
    ],
    ids=["another replica's", "too long", "a path", "empty"],
)
def test_another_replicas_id_is_lost_and_a_malformed_one_is_not_found(instance_id: str, code: ErrorCode) -> None:
    with pytest.raises(TrackwayError) as caught:
        table_of().get(instance_id)

    assert caught.value.code is code


def test_an_id_from_before_a_restart_under_the_same_name_is_lost() -> None:
    before, after = alive(table_of()), table_of()

    assert before.id.startswith("replica0-")
    with pytest.raises(TrackwayError) as caught:
        after.get(before.id)
    assert caught.value.code is ErrorCode.INSTANCE_LOST


def test_the_number_of_instances_is_bounded() -> None:
    table = table_of()
    first, _ = alive(table), alive(table)

    with pytest.raises(TrackwayError, match="fewer than 2 tool instances") as caught:
        alive(table)
    assert caught.value.code is ErrorCode.OVERLOADED
    table.strike(first)
    alive(table)


def added(table: InstanceTable, run: str) -> int:
    """How many instances the run gets before it is refused."""
    for number in range(100):
        try:
            alive(table, run)
        except TrackwayError as error:
            assert error.code is ErrorCode.OVERLOADED
            return number
    raise AssertionError("expected a refusal, got none")


def test_a_run_leaves_instances_for_others_and_gets_their_places_back() -> None:
    table = table_of(max_instances=64)

    assert [added(table, run) for run in ("first", "second", "third", "first")] == [48, 12, 3, 0]
    with pytest.raises(TrackwayError) as caught:
        alive(table, "first")
    assert caught.value.message == (
        "expected fewer than 64 tool instances on this replica, and of a run fewer than 3 times those left, got 63, 48 "
        "of them of this run; release instances, wait for idle ones to expire, or raise max_instances"
    )
    for instance in table.everything()[48:]:
        table.strike(instance)
    for instance in table.everything()[:2]:
        table.strike(instance)
    assert added(table, "first") == 2


@pytest.mark.anyio
async def test_only_idle_instances_expire_and_a_call_starts_the_time_anew() -> None:
    clock = FakeClock()
    table = table_of(clock, max_instances=3)
    idle, busy, used = alive(table), alive(table), alive(table)

    async with table.held(busy, 1.0):
        clock.now = 60.0
        async with table.held(used, 1.0):
            pass
        assert table.take_expired() == []
        clock.now = 60.5
        assert table.take_expired() == [idle]
    assert len(table) == 2


def test_the_idle_time_counts_from_the_end_of_the_creation() -> None:
    clock = FakeClock()
    table = table_of(clock)
    instance = table.add(CalculatorTool.default(), None)

    clock.now = 100.0
    assert table.take_expired() == []
    table.created(instance)
    clock.now = 160.0
    assert (table.take_expired(), table.info(instance).idle_s, table.info(instance).age_s) == ([], 60.0, 160.0)
    clock.now = 160.5
    assert table.take_expired() == [instance]


@pytest.mark.anyio
async def test_a_waiting_call_finds_the_instance_gone_when_it_was_released_before() -> None:
    table = table_of()
    instance = alive(table)

    async def call() -> None:
        async with table.held(instance, 5.0):
            raise AssertionError("a released instance must not be called")

    async with table.held(instance, 1.0):
        retiring = asyncio.create_task(table.retire(instance, 5.0))
        await asyncio.sleep(0)
        calling = asyncio.create_task(call())
        await asyncio.sleep(0)
    await retiring
    with pytest.raises(TrackwayError) as caught:
        await calling
    assert caught.value.code is ErrorCode.INSTANCE_NOT_FOUND


@pytest.mark.anyio
async def test_a_call_does_not_wait_for_ever_for_its_instance() -> None:
    table = table_of()
    instance = alive(table)

    async with table.held(instance, 1.0):
        with pytest.raises(TrackwayError, match=r"expected a free place within 0\.001 s") as caught:
            async with table.held(instance, 0.001):
                pass
    assert caught.value.code is ErrorCode.OVERLOADED
    async with table.held(instance, 1.0):
        assert instance.state is State.BUSY


@pytest.mark.anyio
async def test_a_cancelled_call_leaves_the_instance_usable() -> None:
    table = table_of()
    instance = alive(table)

    async def call() -> None:
        async with table.held(instance, 1.0):
            await asyncio.Event().wait()

    calling = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert instance.state is State.BUSY
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)

    assert instance.state is State.IDLE
    assert not instance.lock.locked()
