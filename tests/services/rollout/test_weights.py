"""A replica follows the store: before it is ready, while it runs, and when a version does not load."""

import logging
from pathlib import Path

import pytest
from engine_runs import started, until, watching

from trackway.clients.weights import WeightStore
from trackway.rollout.engines.sim import SimEngine
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Canary

pytestmark = pytest.mark.anyio

WRONG = Canary(token_ids=[3, 4, 5], logprobs=[-99.0, -99.0])


async def test_a_replica_that_starts_late_holds_the_latest_version_once_started(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    store.publish(7, "run", other_path)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        assert (engine.version, watcher.latest, watcher.ready().ready) == (7, 7, True)


async def test_a_request_waits_until_the_version_it_wants_is_loaded(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        store.publish(1, "run", other_path)
        assert engine.version == 0
        await watcher.catch_up(1)
        assert engine.version == 1


async def test_a_version_published_later_is_loaded_without_a_request(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache"):
        store.publish(1, "run", other_path)
        await until(lambda: engine.version == 1)


async def test_while_the_weights_are_asleep_nothing_is_loaded(
    store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with (
        started(SimEngine(RolloutSettings(engine="sim", enable_sleep=True))) as engine,
        watching(engine, store, tmp_path / "cache", wait_s=0.3) as watcher,
    ):
        await engine.pause("wait")
        await engine.sleep(["weights", "kv_cache"])
        store.publish(1, "run", other_path)
        with pytest.raises(TrackwayError, match="got 0: the newest version published is 1"):
            await watcher.catch_up(1)
        assert (watcher.updates, watcher.ready().ready) == (0, True)
        await engine.wake_up(["weights"])
        await watcher.catch_up(1)
        assert engine.version == 1


async def test_a_version_that_does_not_come_is_refused_after_the_bound(
    engine: TorchEngine, store: WeightStore, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache", wait_s=0.05) as watcher:
        with pytest.raises(TrackwayError, match=r"expected weights version 3 within 0\.05 s, got 0") as raised:
            await watcher.catch_up(3)
    assert raised.value.code is ErrorCode.WEIGHTS_BEHIND
    assert raised.value.detail == {"have": 0, "want": 3}


async def test_without_a_store_a_newer_version_is_refused_at_once(engine: TorchEngine, tmp_path: Path) -> None:
    async with watching(engine, None, tmp_path / "cache", wait_s=3600) as watcher:
        assert watcher.ready().ready
        with pytest.raises(TrackwayError) as raised:
            await watcher.catch_up(1)
    assert raised.value.code is ErrorCode.WEIGHTS_BEHIND


async def test_a_canary_mismatch_keeps_the_old_weights_says_so_once_and_a_next_version_mends_it(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with watching(engine, store, tmp_path / "cache", wait_s=0.3) as watcher:
        store.publish(1, "run", other_path, WRONG)
        with pytest.raises(TrackwayError, match="canary logprobs"):
            await watcher.catch_up(1)
        assert (engine.version, watcher.latest, watcher.updates) == (0, 1, 1)  # tried once, looked at more often
        store.publish(2, "run", other_path)
        await watcher.catch_up(2)
        assert engine.version == 2
    assert [record.message.split(":")[0] for record in caplog.records] == ["weights stay at version 0"]


async def test_a_replica_whose_first_load_fails_is_not_ready_and_does_not_generate(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    store.publish(1, "run", other_path, WRONG)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        assert not watcher.ready().ready
        assert "canary" in watcher.ready().reason
        with pytest.raises(TrackwayError) as raised:
            await watcher.catch_up(0)
    assert raised.value.code is ErrorCode.UNAVAILABLE
