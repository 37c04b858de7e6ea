"""A second server: two replicas on one store, the way back to the base's weights, and a death."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.vllm.vllm_runs import DEADLINE_S, GREEDY, LONG, PROMPT, SHORT, Weights, proof_of, server_of, started, worst
from tests.waiting import async_until
from trackway.clients.weights import WeightStore
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.wire.errors import ErrorCode, TrackwayError


@pytest.fixture(scope="module")
async def mortal(
    server: ModuleType, environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RemoteEngine]:
    """An engine whose server the last test of this module kills; nothing was loaded but the base."""
    async with started(
        server.Replica(server.settings_of(base, tmp_path_factory.mktemp("mortal") / "server.log"))
    ) as engine:
        yield engine


async def test_first_weights_that_fail_lead_back_to_the_base_although_it_has_no_head(
    mortal: RemoteEngine, first: Weights, second: Weights
) -> None:
    assert mortal.version == 0
    with pytest.raises(TrackwayError) as raised:
        await mortal.load_weights(second.folder, 1, proof_of(second.model, shift=0.5))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    made = await mortal.generate(PROMPT, GREEDY, "a")
    assert made.spans[0].version == 0
    assert worst(made, first.model, GREEDY) < 1e-4


async def test_two_replicas_follow_one_store(
    mortal: RemoteEngine, engine: RemoteEngine, second: Weights, tmp_path: Path
) -> None:
    version, store = engine.version + 1, WeightStore(str(tmp_path))
    watchers = [
        WeightWatcher(replica_engine, store, tmp_path / "cache", 0.1, DEADLINE_S) for replica_engine in (mortal, engine)
    ]
    for watcher in watchers:
        await watcher.start()
    store.publish(version, "run", second.folder, proof=second.proof)
    await asyncio.gather(*(watcher.catch_up(version) for watcher in watchers))
    both = await asyncio.gather(*(replica_engine.generate(PROMPT, GREEDY, "a") for replica_engine in (mortal, engine)))
    for watcher in watchers:
        await watcher.stop()
    assert both[0].token_ids == both[1].token_ids
    assert [made.spans[0].version for made in both] == [version, version]
    assert max(worst(made, second.model, GREEDY) for made in both) < 1e-4


async def test_a_server_that_hangs_is_noticed_and_one_that_works_is_not(
    server: ModuleType, mortal: RemoteEngine
) -> None:
    async with server.slowed(mortal):
        task = asyncio.create_task(mortal.generate(PROMPT, LONG, "a"))
        await server.busy(mortal)
        for _ in range(2):
            await async_until(moved(mortal))
        processes = server_of(mortal)
        for process in processes:
            process.suspend()
        await async_until(lambda: mortal.stuck_for() > 5)
        for process in processes:
            process.resume()
        await async_until(moved(mortal))
    assert len((await task).token_ids) == 300


async def test_a_server_that_dies_fails_requests_as_worth_asking_again_and_is_not_ready(
    server: ModuleType, mortal: RemoteEngine
) -> None:
    async with server.slowed(mortal):
        task = asyncio.create_task(mortal.generate(PROMPT, LONG, "a"))
        await server.busy(mortal)
        server_of(mortal)[0].kill()
        with pytest.raises(TrackwayError) as first:
            await task
    await async_until(lambda: mortal.stuck_for() == float("inf"))
    with pytest.raises(TrackwayError, match=mortal.settings.engine) as second:
        await mortal.generate(PROMPT, SHORT, "b")
    for raised in (first.value, second.value):
        assert (raised.code, raised.retryable) == (ErrorCode.UNAVAILABLE, True)


def moved(engine: RemoteEngine) -> Callable[[], bool]:
    """Make a check that is true once `stuck_for` has fallen: the engine saw its server make progress."""
    longest = 0.0

    def has_fallen() -> bool:
        nonlocal longest
        now = engine.stuck_for()
        longest = max(longest, now)
        return now < longest

    return has_fallen
