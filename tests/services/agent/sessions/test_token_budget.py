"""The tokens that the calls of a session may write together."""

import asyncio

import pytest

from trackway.agent.sessions.token_budget import TokenBudget

pytestmark = pytest.mark.anyio


async def test_a_call_waits_for_what_another_one_holds_and_gets_what_is_left() -> None:
    budget, ended = TokenBudget(10), asyncio.Event()
    first = await budget.reserve(8, 1, ended)
    second = asyncio.create_task(budget.reserve(8, 1, ended))
    await asyncio.sleep(0)
    assert (first, second.done()) == (8, False)

    budget.written(3)
    budget.release(8)

    assert await second == 7


async def test_choices_share_it_and_none_may_be_left() -> None:
    budget, ended = TokenBudget(9), asyncio.Event()
    assert await budget.reserve(8, 2, ended) == 4
    budget.written(8)
    budget.release(8)
    assert await budget.reserve(8, 2, ended) == 0


async def test_calls_that_fit_run_side_by_side() -> None:
    budget, ended = TokenBudget(10), asyncio.Event()
    assert [await budget.reserve(5, 1, ended), await budget.reserve(5, 1, ended)] == [5, 5]


async def test_a_waiting_call_learns_that_the_session_has_ended() -> None:
    budget, ended = TokenBudget(4), asyncio.Event()
    await budget.reserve(4, 1, ended)
    waiting = asyncio.create_task(budget.reserve(4, 1, ended))
    await asyncio.sleep(0)

    ended.set()
    budget.wake()

    assert await waiting == 0
