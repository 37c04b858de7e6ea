"""The conditions that tests wait for."""

import pytest

from tests.waiting import async_until, until


def test_the_first_true_value_comes_back() -> None:
    values = iter([0, "", None, 7, 8])

    assert until(lambda: next(values)) == 7


def test_an_ignored_exception_is_not_true_and_another_is_raised() -> None:
    divisors = iter([0, 2])

    assert until(lambda: 4 / next(divisors), ignored=ZeroDivisionError) == 2
    with pytest.raises(StopIteration):
        until(lambda: 4 / next(divisors), ignored=ZeroDivisionError)


def test_the_deadline_names_the_condition_and_the_state() -> None:
    with pytest.raises(AssertionError, match=r"^not true within 0\.01 s: .*lambda: 1 > 2.* it stands at 1$"):
        until(lambda: 1 > 2, within_s=0.01, state=lambda: "it stands at 1")


@pytest.mark.anyio
async def test_an_event_loop_waits_for_what_is_true_at_once_or_later() -> None:
    values = iter([False, False, True])

    async def later() -> bool:
        return next(values)

    await async_until(later)
    await async_until(lambda: True)
    with pytest.raises(AssertionError, match=r"^not true within 0\.01 s: .*lambda: False"):
        await async_until(lambda: False, within_s=0.01)
