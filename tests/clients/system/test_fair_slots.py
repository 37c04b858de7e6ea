"""Slots that several runs share."""

import asyncio

import pytest

from trackway.system.waits import FairSlots

pytestmark = pytest.mark.anyio


async def order(slots: FairSlots, *runs: str) -> list[str]:
    """The runs in the order in which they get a slot, all of which ask before the first is free."""
    got = []

    async def use(run: str) -> None:
        await slots.acquire(run)
        got.append(run)
        await asyncio.sleep(0)
        slots.release(run)

    async with asyncio.TaskGroup() as tasks:
        for run in runs:
            tasks.create_task(use(run))
    return got


async def test_a_small_run_does_not_wait_behind_a_large_one() -> None:
    assert await order(FairSlots(2), *"aaaaaaaa", "b", "b") == [*"aabab", *"aaaaa"]


async def test_runs_take_turns_at_a_single_slot() -> None:
    assert await order(FairSlots(1), *"aaaa", "b", "b", "c") == [*"aabcaba"]


async def test_one_run_gets_its_slots_by_arrival() -> None:
    slots, got = FairSlots(1), []

    async def use(number: int) -> None:
        await slots.acquire("a")
        got.append(number)
        slots.release("a")

    await asyncio.gather(*map(use, range(5)))
    assert got == [0, 1, 2, 3, 4]


async def test_a_slot_of_a_cancelled_wait_goes_to_the_next() -> None:
    slots = FairSlots(1)
    await slots.acquire("a")
    waiting = [asyncio.create_task(slots.acquire(run)) for run in "bcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    slots.release("a")
    waiting[1].cancel()  # it was given the slot, and has not run since
    await asyncio.wait_for(waiting[2], 60)
    slots.release("d")
    await asyncio.wait_for(slots.acquire("e"), 60)
    assert [task.cancelled() for task in waiting] == [True, True, False]


async def test_further_slots_go_to_those_that_wait() -> None:
    slots = FairSlots(1)
    await slots.acquire("a")
    waiting = [asyncio.create_task(slots.acquire(run)) for run in "abc"]
    await asyncio.sleep(0)
    slots.resize(3)
    await asyncio.sleep(0)
    assert ([task.done() for task in waiting], slots.held) == ([False, True, True], 3)
    slots.release("a")
    await asyncio.wait_for(waiting[0], 60)


async def test_with_fewer_slots_none_is_free_until_enough_are_given_back() -> None:
    slots = FairSlots(3)
    for run in "aaa":
        await slots.acquire(run)
    waiting = asyncio.create_task(slots.acquire("b"))
    slots.resize(1)
    for held in (2, 1):
        slots.release("a")
        await asyncio.sleep(0)
        assert (waiting.done(), slots.held) == (False, held)
    slots.release("a")
    await asyncio.wait_for(waiting, 60)
    assert slots.held == 1
