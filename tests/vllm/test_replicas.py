"""A second server: two replicas on one store, the way back to the base's weights, and a death."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from vllm_runs import GREEDY, LONG, PROMPT, SHORT, Weights, busy, canary_of, settings_of, started, worst

from trackway.clients.weights import WeightStore
from trackway.rollout.engines.vllm import VllmEngine
from trackway.rollout.weights import WeightWatcher
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
async def mortal(environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """An engine whose server the last test of this module kills; nothing was loaded but the base."""
    async with started(settings_of(base, tmp_path_factory.mktemp("mortal") / "vllm.log")) as engine:
        yield engine


async def test_first_weights_that_fail_lead_back_to_the_base_although_it_has_no_head(
    mortal: VllmEngine, first: Weights, second: Weights
) -> None:
    assert mortal.version == 0
    with pytest.raises(TrackwayError) as raised:
        await mortal.load_weights(second.folder, 1, canary_of(second.model, shift=0.5))
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT
    made = await mortal.generate(PROMPT, GREEDY, "a")
    assert made.spans[0].version == 0
    assert worst(made, first.model, GREEDY) < 1e-4


async def test_two_replicas_follow_one_store(
    mortal: VllmEngine, engine: VllmEngine, second: Weights, tmp_path: Path
) -> None:
    version, store = engine.version + 1, WeightStore(str(tmp_path))
    watchers = [WeightWatcher(one, store, tmp_path / "cache", 0.1, 30.0) for one in (mortal, engine)]
    for watcher in watchers:
        await watcher.start()
    store.publish(version, "run", second.folder, second.canary)
    await asyncio.gather(*(watcher.catch_up(version) for watcher in watchers))
    both = await asyncio.gather(*(one.generate(PROMPT, GREEDY, "a") for one in (mortal, engine)))
    for watcher in watchers:
        await watcher.stop()
    assert both[0].token_ids == both[1].token_ids
    assert [made.spans[0].version for made in both] == [version, version]
    assert max(worst(made, second.model, GREEDY) for made in both) < 1e-4


async def test_a_server_that_hangs_is_noticed_and_one_that_works_is_not(mortal: VllmEngine) -> None:
    task = asyncio.gather(*(mortal.generate([n, 7], LONG, str(n)) for n in range(3, 7)))
    began, stillest = time.monotonic(), 0.0
    while not task.done():
        await asyncio.sleep(0.1)
        stillest = max(stillest, mortal.stuck_for())
    assert stillest < 0.7 * (time.monotonic() - began)
    task = asyncio.create_task(mortal.generate(PROMPT, LONG, "b"))
    await busy(mortal)
    processes = server_of(mortal)
    for process in processes:
        process.suspend()
    async with asyncio.timeout(20):
        while mortal.stuck_for() < 5:
            await asyncio.sleep(0.1)
    for process in processes:
        process.resume()
    assert len((await task).token_ids) == 1000


async def test_a_server_that_dies_fails_requests_as_worth_asking_again_and_is_not_ready(mortal: VllmEngine) -> None:
    task = asyncio.create_task(mortal.generate(PROMPT, LONG, "a"))
    await busy(mortal)
    server_of(mortal)[0].kill()
    for call in (task, mortal.generate(PROMPT, SHORT, "b")):
        with pytest.raises(TrackwayError, match="vllm") as raised:
            await call
        assert (raised.value.code, raised.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert mortal.stuck_for() == float("inf")


def server_of(engine: VllmEngine) -> list[psutil.Process]:
    """The server's processes, its own first."""
    port = engine.http.base_url.rpartition(":")[2]
    [server] = (
        p for p in psutil.Process().children(recursive=True) if p.cmdline()[1:2] == ["-m"] and port in p.cmdline()
    )
    return [server, *server.children(recursive=True)]
