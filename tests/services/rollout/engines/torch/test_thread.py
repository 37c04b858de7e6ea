"""The engine's thread: what the watchdog sees, and that nobody waits for a thread that has died."""

import asyncio
import math
import threading
import time

import pytest

from tests.services.rollout.engine_runs import LONG, PROMPT, running, started
from tests.waiting import async_until
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.anyio


def die() -> None:
    raise MemoryError("planted")


def unavailable(result: object) -> bool:
    return isinstance(result, TrackwayError) and result.code is ErrorCode.UNAVAILABLE and "planted" in result.message


async def test_an_idle_engine_is_not_stuck(engine: TorchEngine) -> None:
    await async_until(lambda: engine.stuck_for() == 0.0)
    await engine.generate(PROMPT, LONG, "a")
    await async_until(lambda: engine.stuck_for() == 0.0)


async def test_an_engine_at_work_is_not_stuck_and_a_frozen_one_neither(engine: TorchEngine) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, LONG, "a"))
    await running(engine, 1)
    await async_until(lambda: engine.stuck_for() < 0.2)
    await engine.pause("keep")
    await async_until(lambda: engine.stuck_for() == 0.0)
    await engine.resume()
    assert len((await task).token_ids) == 300


async def test_an_engine_whose_thread_hangs_is_stuck_until_it_goes_on(engine: TorchEngine) -> None:
    idle = time.monotonic()
    await async_until(lambda: time.monotonic() - idle > 0.2)  # idle time must not count
    let_go, began = threading.Event(), time.monotonic()
    engine._thread.post(let_go.wait)
    await async_until(lambda: engine.stuck_for() > 0.1)
    stuck, passed = engine.stuck_for(), time.monotonic() - began
    let_go.set()
    assert 0.1 < stuck <= passed
    await engine.generate(PROMPT, LONG, "a")
    await async_until(lambda: engine.stuck_for() < 0.1)


async def test_requests_and_calls_on_a_thread_that_dies_raise_and_so_do_later_ones(
    settings: RolloutSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(60), started(TorchEngine(settings)) as engine:
        generation = asyncio.create_task(engine.generate(PROMPT, LONG, "runs"))
        await running(engine, 1)
        engine._thread.post(die)
        others = (engine.generate(PROMPT, LONG, "waits"), anext(engine.stream(PROMPT, LONG, "s")), engine.abort("x"))
        assert all(map(unavailable, await asyncio.gather(generation, *others, return_exceptions=True)))
        later = (engine.generate(PROMPT, LONG, "late"), engine.abort("x"), engine.pause("keep"), engine.resume())
        assert all(map(unavailable, await asyncio.gather(*later, return_exceptions=True)))
        assert engine.stuck_for() == math.inf
    assert "restart this replica" in caplog.text


async def test_a_call_whose_caller_left_is_not_made(engine: TorchEngine) -> None:
    let_go, made = threading.Event(), list[int]()
    engine._thread.post(let_go.wait)
    left = asyncio.create_task(engine._thread.call(lambda: made.append(1)))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    let_go.set()
    await engine._thread.call(lambda: made.append(2))
    assert made == [2]
