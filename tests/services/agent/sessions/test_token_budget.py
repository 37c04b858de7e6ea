"""The tokens that the calls of a session may write together."""

import asyncio

import pytest

from trackway.agent.sessions.session import TokenBudget

pytestmark = pytest.mark.anyio


async def test_a_call_waits_for_what_another_one_holds_and_gets_what_is_left() -> None:
    budget, ended = TokenBudget(10), asyncio.Event()
    assert (budget.must_wait(8, 1), budget.reserve(8, 1), budget.must_wait(8, 1)) == (False, 8, True)
    second = asyncio.create_task(budget.freed(8, 1, ended))
    await asyncio.sleep(0)
    assert not second.done()

    budget.written(3)
    budget.release(8)
    await second

    assert budget.reserve(8, 1) == 7


def test_choices_share_it_and_none_may_be_left() -> None:
    budget = TokenBudget(9)
    assert budget.reserve(8, 2) == 4
    budget.written(8)
    budget.release(8)
    assert (budget.must_wait(8, 2), budget.reserve(8, 2)) == (False, 0)


def test_calls_that_fit_run_side_by_side() -> None:
    budget = TokenBudget(10)
    assert [(budget.must_wait(5, 1), budget.reserve(5, 1)) for _ in range(2)] == [(False, 5), (False, 5)]


async def test_a_waiting_call_learns_that_the_session_has_ended() -> None:
    budget, ended = TokenBudget(4), asyncio.Event()
    budget.reserve(4, 1)
    waiting = asyncio.create_task(budget.freed(4, 1, ended))
    await asyncio.sleep(0)

    ended.set()
    budget.wake()
    await waiting

    assert budget.reserve(4, 1) == 0
