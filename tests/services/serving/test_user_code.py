"""User code in tasks of its own: what it raises, what it is told, and what it leaves behind."""

import asyncio
import sys
from contextlib import AbstractContextManager
from typing import Any

import pytest

from trackway.serving.user_code import (
    UserCodeExit,
    contain_tasks,
    importing,
    located,
    own_context,
    run_user_code,
    user_code,
)

pytestmark = pytest.mark.anyio


async def test_a_result_and_an_exception_pass_as_they_are() -> None:
    async def answers() -> int:
        return 4

    async def fails() -> int:
        raise KeyError("k")

    assert await run_user_code(answers) == 4
    with pytest.raises(KeyError, match="'k'"):
        await run_user_code(fails)


async def test_the_callers_cancellation_reaches_the_code_with_its_message_and_is_no_failure() -> None:
    heard: list[object] = []
    began = asyncio.Event()

    async def waits() -> None:
        try:
            began.set()
            await asyncio.sleep(30)
        except asyncio.CancelledError as error:
            heard.extend(error.args)
            await asyncio.sleep(0)
            heard.append("tidied up")
            raise

    caller = asyncio.create_task(run_user_code(waits))
    await began.wait()
    caller.cancel("enough")

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (heard, caller.cancelled()) == (["enough", "tidied up"], True)


async def test_an_error_on_the_way_out_of_a_cancelled_call_is_raised() -> None:
    async def waits() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            sys.exit(2)

    with pytest.raises(UserCodeExit, match=r"^it called sys.exit\(2\)$"):
        async with asyncio.timeout(0.01):
            await run_user_code(waits)


async def test_a_task_of_the_codes_own_that_is_cancelled_before_it_starts_leaves_no_warning() -> None:
    contain_tasks(asyncio.get_running_loop())

    async def never() -> None:
        raise AssertionError("it was cancelled")

    async def starts_one() -> bool:
        task = asyncio.create_task(never(), name="mine")
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled() and task.get_name() == "mine"

    assert await run_user_code(starts_one)


async def test_the_tasks_of_others_are_made_as_before() -> None:
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__name__)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(factory)
    contain_tasks(loop)
    contain_tasks(loop)

    async def own() -> int:
        return 1

    async def makes_one() -> int:
        return await asyncio.create_task(own())

    async def makes_one_of_the_service() -> int:
        return await asyncio.create_task(own(), context=own_context())

    assert await asyncio.create_task(own()) == 1
    assert await run_user_code(makes_one) == 1
    assert made == ["own", "run", "contained"]
    assert await run_user_code(makes_one_of_the_service) == 1
    assert made[3:] == ["run", "own"]


def test_synchronous_code_is_named_and_an_exception_passes() -> None:
    with pytest.raises(UserCodeExit, match=r"^scorer x: it raised GeneratorExit, which is not an Exception$"):
        enter_and_raise(user_code("scorer x"), GeneratorExit())
    with pytest.raises(UserCodeExit, match=r"^module y: it called sys.exit\(\) on import; put what must not run"):
        enter_and_raise(importing("module y"), SystemExit())
    with pytest.raises(ImportError, match="no z"):
        enter_and_raise(importing("module z"), ImportError("no z"))


def enter_and_raise(around: AbstractContextManager[None], error: BaseException) -> None:
    with around:
        raise error


async def test_a_forgotten_await_is_suggested() -> None:
    async def turn() -> str:
        return "text"

    unawaited = turn()
    with pytest.raises(AttributeError) as caught:
        unawaited.upper()  # type: ignore[attr-defined]
    unawaited.close()

    assert located(caught.value).endswith(": is an `await` missing?)")
    assert "await" not in located(AttributeError("'str' object has no attribute 'x'"))
