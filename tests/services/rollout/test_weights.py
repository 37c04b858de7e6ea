"""A replica follows the store: before it is ready, while it runs, and when a version does not load."""

import asyncio
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from benchmarks.sim_engine import SIM, SimEngine
from safetensors.torch import load_file, save_file

from tests.services.rollout.engine_runs import LONG, PROMPT, started, watching
from tests.services.rollout.idle_engine import IdleEngine
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF, WRONG_PROOF
from trackway.clients.weights import WeightStore
from trackway.learner.weight_proof import tensor_digests
from trackway.rollout.app import create_app
from trackway.rollout.engines.protocol import Piece
from trackway.rollout.engines.torch import engine as torch_engine
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Verdict, WeightProof

pytestmark = pytest.mark.anyio


async def test_a_replica_that_starts_late_holds_the_latest_version_once_started(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    store.publish(7, "run", other_path, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        assert (engine.version, watcher.latest, watcher.ready().ready) == (7, 7, True)


async def test_an_older_version_in_the_store_is_not_loaded_over_a_newer_one(
    engine: TorchEngine, store: WeightStore, model_path: Path, other_path: Path, tmp_path: Path
) -> None:
    store.publish(7, "run", other_path, ANY_PROOF)
    async with watching(engine, store, tmp_path / "cache"):
        assert engine.version == 7
    older = WeightStore(str(tmp_path / "older"))
    older.publish(3, "run", model_path, ANY_PROOF)
    async with watching(engine, older, tmp_path / "cache", interval_s=60) as watcher:
        assert (engine.version, watcher.latest, watcher.updates) == (7, 7, 0)
        await watcher.catch_up(7)


async def test_a_request_waits_until_the_version_it_wants_is_loaded(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        store.publish(1, "run", other_path, ANY_PROOF)
        assert engine.version == 0
        await watcher.catch_up(1)
        assert engine.version == 1


async def test_a_version_published_later_is_loaded_without_a_request(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with watching(engine, store, tmp_path / "cache"):
        store.publish(1, "run", other_path, ANY_PROOF)
        await async_until(lambda: engine.version == 1)


@pytest.mark.parametrize("kind", ["whole", "adapter"])
async def test_a_replica_generates_while_it_fetches_reads_and_proves_new_weights(
    engine: TorchEngine, model_path: Path, other_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store, folder, pieces, done = WeightStore(f"memory://{tmp_path.name}"), tmp_path / "1", list[Piece](), list[str]()
    shutil.copytree(other_path, folder)
    if kind == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    store.publish(1, "run", folder, proof=WeightProof(digests=tensor_digests(folder)))

    async def listen() -> None:
        while True:
            pieces.extend([piece async for piece in engine.stream(PROMPT, LONG, "a")])

    def beside_tokens(what: str, work: Callable[..., object]) -> Callable[..., object]:
        """The work, once more pieces came than were there when it was asked for."""

        def waits(*given: object) -> object:
            seen, end = len(pieces), time.monotonic() + 60
            while len(pieces) == seen:
                assert time.monotonic() < end, f"expected tokens while the replica has to {what}, got none"
                time.sleep(0.001)
            done.append(what)
            return work(*given)

        return waits

    load = torch_engine.load
    monkeypatch.setattr(store, "fetch", beside_tokens("fetch", store.fetch))
    monkeypatch.setattr(torch_engine, "load", beside_tokens("read", load))
    merge = beside_tokens("merge", lambda decoder, base, _: load(decoder, other_path))
    monkeypatch.setattr(torch_engine, "load_merged", merge)
    monkeypatch.setattr(torch_engine, "prove", beside_tokens("prove", torch_engine.prove))
    listening = asyncio.create_task(listen())
    async with watching(engine, store, tmp_path / "cache", interval_s=60) as watcher:
        listening.cancel()
        await asyncio.wait([listening])
        assert (engine.version, watcher.latest) == (1, 1)

    assert done == ["fetch", "read" if kind == "whole" else "merge", "prove"]
    fsspec.filesystem("memory").store.clear()


async def test_replicas_of_a_host_share_a_cache_for_each_store(
    model_path: Path, other_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("a", "b"):
        store = WeightStore(f"memory://{tmp_path.name}-{name}")
        store.publish(1, "run", other_path, ANY_PROOF)
        for _ in range(2):
            app = create_app(RolloutSettings(model_path=model_path, weights_url=store.url), IdleEngine())
            async with app.router.lifespan_context(app):
                pass

    caches = [sorted(path.name for path in cache.iterdir()) for cache in tmp_path.glob("trackway-weights-*")]
    assert caches == [[".lock", "1"]] * 2
    fsspec.filesystem("memory").store.clear()


async def test_while_the_weights_are_asleep_nothing_is_loaded(
    store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    async with (
        started(SimEngine(RolloutSettings(engine=SIM, enable_sleep=True))) as engine,
        watching(engine, store, tmp_path / "cache", wait_s=0.3) as watcher,
    ):
        await engine.pause("wait")
        await engine.sleep(["weights", "kv_cache"])
        store.publish(1, "run", other_path, ANY_PROOF)
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


async def test_a_wrong_proof_keeps_the_old_weights_says_so_once_and_a_next_version_mends_it(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with watching(engine, store, tmp_path / "cache", wait_s=0.3) as watcher:
        store.publish(1, "run", other_path, WRONG_PROOF)
        with pytest.raises(TrackwayError, match="got other weights"):
            await watcher.catch_up(1)
        assert (engine.version, watcher.latest, watcher.updates) == (0, 1, 0)  # no request was held back for it
        store.publish(2, "run", other_path, ANY_PROOF)
        await watcher.catch_up(2)
        assert engine.version == 2
    assert [record.message.split(":")[0] for record in caplog.records] == ["weights stay at version 0"]


async def test_an_engine_that_keeps_old_weights_is_said_to_be_stale_once_and_serves_on(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch_engine.load
    monkeypatch.setattr(torch_engine, "load", lambda decoder, _: load(decoder, engine._settings.model_path))
    async with watching(engine, store, tmp_path / "cache", wait_s=0.3) as watcher:
        store.publish(1, "run", other_path, proof=WeightProof(digests=tensor_digests(other_path)))
        with pytest.raises(TrackwayError, match=r"engine with weights version 1 .* still has the version before"):
            await watcher.catch_up(1)
        assert (engine.version, engine.judgement, watcher.updates) == (0, None, 0)
        monkeypatch.undo()
        store.publish(2, "run", other_path, proof=WeightProof(digests=tensor_digests(other_path)))
        await watcher.catch_up(2)
    assert engine.judgement is not None
    assert engine.judgement.verdict is Verdict.PROVEN


async def test_a_replica_whose_first_load_fails_is_not_ready_and_does_not_generate(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    store.publish(1, "run", other_path, WRONG_PROOF)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        assert not watcher.ready().ready
        assert "other weights" in watcher.ready().reason
        with pytest.raises(TrackwayError) as raised:
            await watcher.catch_up(0)
    assert raised.value.code is ErrorCode.UNAVAILABLE


def spoiled(source: Path, into: Path, number: float) -> Path:
    """A copy of a model with this number in one of its weights."""
    folder = Path(shutil.copytree(source, into))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].double()
    tensors[name][3, 5] = number
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1e300], ids=["NaN", "infinity", "infinite in float32"])
async def test_weights_that_are_not_finite_are_refused_by_name_whatever_their_proof(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path, number: float
) -> None:
    async with watching(engine, store, tmp_path / "cache", wait_s=0.3) as watcher:
        store.publish(1, "run", spoiled(other_path, tmp_path / "spoiled", number), ANY_PROOF)
        with pytest.raises(TrackwayError, match=r"NaN or infinities in model\.layers\.1\.mlp\.up_proj\.weight"):
            await watcher.catch_up(1)
        assert (engine.version, watcher.latest, watcher.updates) == (0, 1, 0)
        store.publish(2, "run", other_path, ANY_PROOF)
        await watcher.catch_up(2)


async def test_an_engine_does_not_start_on_a_model_that_is_not_finite(model_path: Path, tmp_path: Path) -> None:
    folder = spoiled(model_path, tmp_path / "spoiled", math.nan)
    with pytest.raises(TrackwayError, match="expected finite weights") as raised:
        await TorchEngine(RolloutSettings(model_path=folder, device="cpu")).start()
    assert raised.value.code is ErrorCode.WEIGHTS_CORRUPT


@pytest.mark.parametrize(
    ("proof", "wrong"),
    [
        (None, "proof: Field required"),
        ({}, "proof: Value error, expected digests or a probe with positions, got neither"),
        ({"probes": [{"token_ids": [5], "positions": [], "logprobs": []}]}, "proof: Value error, expected digests or"),
    ],
    ids=["none", "empty", "of no token"],
)
async def test_a_version_without_a_proof_is_refused_by_name(
    engine: TorchEngine, store: WeightStore, other_path: Path, tmp_path: Path, proof: object, wrong: str
) -> None:
    store.publish(1, "run", other_path, ANY_PROOF)
    manifest = tmp_path / "weights" / "1" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["proof"]
    manifest.write_text(json.dumps(content if proof is None else {**content, "proof": proof}))
    async with watching(engine, store, tmp_path / "cache") as watcher:
        reason = watcher.ready().reason
        with pytest.raises(TrackwayError) as raised:
            store.manifest(1)
    assert (engine.version, raised.value.code) == (0, ErrorCode.WEIGHTS_CORRUPT)
    assert f"expected {manifest} to be readable, got {wrong}" in reason
    assert "publish a new version" in reason
