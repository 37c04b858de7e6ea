"""Engines and watchers that run for the length of a block, a request that takes a while, and waiting."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tests.waiting import async_until
from trackway.clients.weights import WeightStore
from trackway.rollout.engines.protocol import Engine, PauseMode
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.wire.rollout import SamplingParams

LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
PROMPT = [11, 12, 13]

AnEngine = TypeVar("AnEngine", bound=Engine)


@asynccontextmanager
async def started(engine: AnEngine) -> AsyncIterator[AnEngine]:
    """The engine, which is stopped at the end."""
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def watching(
    engine: Engine,
    store: WeightStore | None,
    cache: Path,
    *,
    wait_s: float = 5.0,
    interval_s: float = 0.02,
    mode: PauseMode = "keep",
) -> AsyncIterator[WeightWatcher]:
    """A watcher that has looked at the store once and goes on until the end."""
    watcher = WeightWatcher(engine, store, cache, interval_s, wait_s, mode)
    await watcher.start()
    try:
        yield watcher
    finally:
        await watcher.stop()


async def running(engine: Engine, count: int) -> None:
    """Return when `count` requests run and have generated something."""
    await async_until(lambda: engine.stats().running >= count and engine.stats().generated_tokens >= count)
