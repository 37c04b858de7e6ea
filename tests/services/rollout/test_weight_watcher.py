"""The watcher alone, on an engine that takes any weights: what it loads, when it looks again, what it tells."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import fsspec
import pytest

from tests.services.rollout.engine_runs import watching
from tests.services.rollout.idle_engine import IdleEngine
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore, WholeWeights
from trackway.rollout import weight_watcher as module
from trackway.rollout.engines.protocol import Swapping
from trackway.rollout.engines.weight_proof import Judgement
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Ready
from trackway.wire.weights import Verdict, WeightProof

pytestmark = pytest.mark.anyio


class NotingEngine(IdleEngine):
    """Notes what it is asked for; may refuse weights, or wait before it takes them or pauses."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.refusals: list[Exception] = []
        """One for each of the next loads."""
        self.reads, self.loads, self.drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.loads.set()
        self.drained.set()

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        await self.reads.wait()
        async with swapping():
            self.events.append(f"load {version}")
            await self.loads.wait()
            if self.refusals:
                raise self.refusals.pop(0)
            self.version = version

    async def pause(self, mode: str) -> None:
        self.events.append(f"pause {mode}")
        if mode == "wait":
            await self.drained.wait()

    async def resume(self) -> None:
        self.events.append("resume")


class Waits:
    """`asyncio` with timeouts that are noted and passed at once."""

    def __init__(self) -> None:
        self.noted: list[float] = []

    def timeout(self, delay: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
        self.noted.append(delay)
        return asyncio.timeout(min(delay, 0.001))

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    noting = Waits()
    monkeypatch.setattr(module, "asyncio", noting)
    return noting


@pytest.fixture
def engine(anyio_backend: str) -> NotingEngine:
    return NotingEngine()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[WeightStore]:
    """A store whose versions must be copied to the cache."""
    yield WeightStore(f"memory://{tmp_path.name}")
    fsspec.filesystem("memory").store.clear()


def corrupt() -> TrackwayError:
    return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, "other weights")


@pytest.mark.parametrize(("held", "loaded"), [(0, ["load 7"]), (6, ["load 7"]), (7, []), (8, [])])
async def test_only_a_newer_version_is_loaded(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path, held: int, loaded: list[str]
) -> None:
    engine.version = held
    store.publish(7, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        assert (engine.events, watcher.updates, watcher.latest) == (loaded, len(loaded), max(held, 7))
        assert watcher.ready() == Ready(ready=True)
        assert (watcher.behind(engine.version), watcher.behind(engine.version + 1)) == (False, True)


async def test_nothing_is_loaded_from_an_empty_store_and_the_replica_is_ready(
    engine: NotingEngine, store: WeightStore, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        assert (engine.events, watcher.latest, watcher.ready()) == ([], 0, Ready(ready=True))


async def test_a_sleeping_engine_is_left_alone(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path
) -> None:
    engine.asleep = frozenset({"weights"})
    store.publish(7, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        assert (engine.events, watcher.latest, watcher.ready()) == ([], 7, Ready(ready=True))


async def test_a_replica_is_not_ready_before_it_has_read_its_store(
    engine: NotingEngine, store: WeightStore, tmp_path: Path
) -> None:
    watcher = WeightWatcher(engine, store, tmp_path / "cache", 60.0, 5.0)

    with pytest.raises(TrackwayError) as caught:
        await watcher.catch_up(0)

    reason = "weights are not loaded yet: the store was not read yet"
    assert (watcher.ready(), watcher.updates) == (Ready(ready=False, reason=reason), 0)
    assert (caught.value.code, caught.value.message) == (ErrorCode.UNAVAILABLE, f"{reason}; retry later")


async def test_without_a_store_a_replica_is_ready_and_refuses_newer_versions_at_once(
    engine: NotingEngine, tmp_path: Path, waits: Waits
) -> None:
    async with watching(engine, None, tmp_path / "cache", wait_s=3600.0) as watcher:
        assert watcher.ready() == Ready(ready=True)
        await watcher.catch_up(0)
        with pytest.raises(TrackwayError) as caught:
            await watcher.catch_up(1)
    assert waits.noted == [0]
    assert caught.value.message == (
        "expected weights version 1 within 3600.0 s, got 0: the newest version published is 0; retry later"
    )


@pytest.mark.parametrize(("within_s", "bound_s", "said"), [(None, 0.126, "0.13"), (0.254, 0.254, "0.25")])
async def test_a_version_that_does_not_come_is_refused_after_the_bound_given_or_the_usual_one(
    engine: NotingEngine,
    store: WeightStore,
    tmp_path: Path,
    waits: Waits,
    within_s: float | None,
    bound_s: float,
    said: str,
) -> None:
    watcher = WeightWatcher(engine, store, tmp_path / "cache", 60.0, 0.126)
    await watcher._try_sync(store)

    with pytest.raises(TrackwayError) as caught:
        await watcher.catch_up(2, within_s)

    assert waits.noted == [bound_s]
    assert (caught.value.code, caught.value.detail) == (ErrorCode.WEIGHTS_BEHIND, {"have": 0, "want": 2})
    assert caught.value.message == (
        f"expected weights version 2 within {said} s, got 0: the newest version published is 0; retry later"
    )


async def test_a_request_for_a_newer_version_makes_the_watcher_look(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        for version in (1, 2):
            store.publish(version, "run", source, ANY_PROOF)
            await watcher.catch_up(version)
            assert engine.version == version


async def test_looks_that_fail_come_ever_later_up_to_five_seconds(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path, waits: Waits
) -> None:
    engine.refusals = [OSError("no room") for _ in range(6)]
    store.publish(1, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=0.5):
        await async_until(lambda: len(waits.noted) >= 8)
    assert waits.noted[:8] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 0.5, 0.5]
    assert engine.events == ["load 1"] * 7


async def test_a_version_that_the_engine_refuses_is_tried_once_and_the_next_one_is_taken(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path, waits: Waits
) -> None:
    engine.refusals = [corrupt()]
    store.publish(1, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=0.5) as watcher:
        await async_until(lambda: len(waits.noted) >= 3)
        reason = "weights are not loaded yet: other weights"
        assert (engine.events, watcher.updates, watcher.ready()) == (["load 1"], 1, Ready(ready=False, reason=reason))
        store.publish(2, "run", source, ANY_PROOF)
        await async_until(lambda: engine.version == 2)
    assert engine.events == ["load 1", "load 2"]


async def test_a_request_for_a_refused_version_fails_at_once(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path
) -> None:
    store.publish(1, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", wait_s=600.0) as watcher:
        await async_until(lambda: engine.version == 1)
        engine.refusals = [corrupt()]
        waiting = asyncio.create_task(watcher.catch_up(2))
        store.publish(2, "run", source, ANY_PROOF)
        for request in (waiting, watcher.catch_up(2)):
            with pytest.raises(TrackwayError, match="other weights") as raised:
                async with asyncio.timeout(30):
                    await request
            assert (raised.value.code, raised.value.retryable) == (ErrorCode.WEIGHTS_CORRUPT, False)
        store.publish(3, "run", source, ANY_PROOF)
        await watcher.catch_up(3)
    assert engine.version == 3


async def test_an_error_is_logged_once_and_again_when_it_changes(
    engine: NotingEngine,
    store: WeightStore,
    source: Path,
    tmp_path: Path,
    waits: Waits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.refusals = [OSError(why) for why in ("no room", "no room", "no room", "no right")]
    store.publish(1, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=0.5):
        await async_until(lambda: engine.version == 1)
    assert [record.message for record in caplog.records] == [
        "weights stay at version 0: OSError: no room",
        "weights stay at version 0: OSError: no right",
    ]


async def test_a_version_that_failed_once_is_no_reason_any_more_when_it_is_loaded(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path
) -> None:
    engine.refusals = [OSError("no room")]
    store.publish(1, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=0.001) as watcher:
        await async_until(lambda: watcher.ready().ready)
        with pytest.raises(TrackwayError, match="got 1: the newest version published is 1; retry later"):
            await watcher.catch_up(2, 0.01)


@pytest.mark.parametrize(
    ("judgement", "said"), [(None, "no verdict yet"), (Judgement(Verdict.PROVEN, "right"), "proven")]
)
async def test_a_load_is_logged_with_its_verdict(
    engine: NotingEngine,
    store: WeightStore,
    source: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    judgement: Judgement | None,
    said: str,
) -> None:
    caplog.set_level(logging.INFO, "trackway.rollout")
    engine.judgement = judgement
    store.publish(3, "run-a", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=60):
        pass
    assert [record.message for record in caplog.records] == [f"weights version 3 of run run-a loaded: {said}"]


@pytest.mark.parametrize(
    ("mode", "wanted", "paused", "events", "updates"),
    [
        ("keep", None, False, ["load 1"], 1),
        ("keep", None, True, ["load 1"], 1),
        ("wait", None, True, ["load 1"], 1),
        ("wait", None, False, ["pause wait", "load 1", "resume"], 2),
        ("abort", None, False, ["pause abort", "load 1", "resume"], 2),
        ("abort", "keep", False, ["load 1"], 1),
        ("keep", "wait", False, ["pause wait", "load 1", "resume"], 2),
    ],
)
async def test_requests_are_held_back_unless_they_may_run_on_or_none_can(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path, mode, wanted, paused, events, updates
) -> None:
    engine.paused = paused
    store.publish(1, "run", source, ANY_PROOF, update_mode=wanted)
    async with watching(engine, store, tmp_path / "cache", interval_s=60, mode=mode) as watcher:
        assert (engine.events, watcher.updates) == (events, updates)


async def test_while_requests_are_held_back_the_replica_is_not_ready_and_the_gate_is_shut(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache", wait_s=0.01, interval_s=0.001, mode="abort") as watcher:
        await watcher.gate()
        engine.loads.clear()
        store.publish(3, "run", source, ANY_PROOF)
        await async_until(lambda: "load 3" in engine.events)

        assert watcher.ready() == Ready(ready=False, reason="weights version 3 is being loaded")
        with pytest.raises(TrackwayError) as caught:
            await watcher.gate()
        assert (caught.value.code, caught.value.message) == (
            ErrorCode.PAUSED,
            "weights version 3 is still being loaded after 0.01 s; retry later",
        )

        engine.loads.set()
        await async_until(lambda: watcher.ready().ready)
        await watcher.gate()


async def test_requests_that_do_not_finish_in_time_are_cut(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path, waits: Waits
) -> None:
    engine.drained.clear()
    store.publish(1, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=60, mode="wait"):
        assert engine.events == ["pause wait", "pause abort", "load 1", "resume"]
        assert waits.noted[0] == 300.0


async def test_of_the_copies_the_loaded_version_and_two_before_are_kept_and_nothing_else_is_touched(
    engine: NotingEngine, remote: WeightStore, source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for name in ("2", "8", "9", "10", ".8.5f0e", ".12.77aa", "13", "notes"):
        (cache / name).mkdir(parents=True)
    (cache / "7").write_bytes(b"a file")
    remote.publish(11, "run", source, ANY_PROOF)

    async with watching(engine, remote, cache, interval_s=60) as watcher:
        assert watcher.ready() == Ready(ready=True)

    assert sorted(path.name for path in cache.iterdir()) == [".12.77aa", ".lock", "10", "11", "13", "7", "9", "notes"]


async def test_versions_that_are_read_in_place_are_the_stores_own(
    engine: NotingEngine, store: WeightStore, source: Path, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        store.publish(version, "run", source, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        assert (watcher.ready(), store.versions()) == (Ready(ready=True), [1, 2, 3])


def publish_delta(store: WeightStore, source: Path, version: int) -> None:
    """The next words of the weights, as a delta against the version before."""
    base = WholeWeights(store.manifest(version - 1), source.with_name(f"{version - 1}"))
    folder = source.with_name(f"{version}")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"xy" * version + b"ab" * (5000 - version))
    store.publish(version, "run", folder, ANY_PROOF, base=base if base.folder.is_dir() else None)


@pytest.fixture
def deltas(store: WeightStore, source: Path) -> WeightStore:
    """An anchor, version 4, and three deltas."""
    (source / "model.safetensors").write_bytes(b"ab" * 5000)
    store.publish(3, "run", source, ANY_PROOF)
    for version in (4, 5, 6, 7):
        publish_delta(store, source, version)
    assert [store.manifest(version).delta is None for version in (4, 5, 6, 7)] == [True, False, False, False]
    return store


async def test_a_replica_that_is_restarted_between_an_anchor_and_a_delta_goes_on_with_its_copies(
    engine: NotingEngine, deltas: WeightStore, source: Path, tmp_path: Path
) -> None:
    async with watching(engine, deltas, tmp_path / "cache", interval_s=60):
        pass
    (tmp_path / "cache" / ".8.0123456789ab.tmp").mkdir()  # it was killed while it made a copy
    publish_delta(deltas, source, 8)
    again, reader = NotingEngine(), WeightStore(deltas.url)

    async with watching(again, reader, tmp_path / "cache", interval_s=60):
        pass

    assert (engine.events, again.events, again.version) == (["load 7"], ["load 8"], 8)
    delta = deltas.manifest(8).delta
    assert delta is not None
    assert reader.fetched_bytes == sum(file.size for file in delta.files)


@pytest.mark.parametrize(("held", "loaded"), [(0, ["load 4"]), (3, ["load 4"]), (4, []), (5, [])])
async def test_without_a_delta_on_the_way_the_newest_whole_version_is_loaded_until_another_one_comes(
    engine: NotingEngine,
    deltas: WeightStore,
    source: Path,
    tmp_path: Path,
    held: int,
    loaded: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.version = held
    (tmp_path / "weights" / "6" / "model.safetensors.delta").unlink()

    async with watching(engine, deltas, tmp_path / "cache", interval_s=0.01) as watcher:
        assert (engine.events, watcher.latest, deltas.fallbacks) == (loaded, 7, len(loaded))
        assert watcher.ready().ready is bool(loaded)
        with pytest.raises(TrackwayError, match=r"model\.safetensors\.delta of weights version 6: .* got no file"):
            await watcher.catch_up(7 if loaded else 0, 0.01)
        deltas.publish(8, "run", source, ANY_PROOF)
        await async_until(lambda: watcher.ready().ready)
        await watcher.catch_up(8)

    assert engine.events == [*loaded, "load 8"]
    named = [record.message for record in caplog.records if "is loaded in place of" in record.message]
    assert [message.split(":")[0] for message in named] == ["weights version 4 is loaded in place of 7"] * len(loaded)
