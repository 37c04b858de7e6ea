"""Weights that a real vLLM takes from the learner's memory: its phases, its reload, and the way back to the store."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.services.rollout.engines.remote.file_memory import FileMemory
from tests.services.rollout.engines.remote.model_in_memory import ModelInMemory
from tests.vllm.vllm_runs import DEVICE, GREEDY, MARKS, PROMPT, Weights, settings_of, started, worst
from trackway.clients.weights import WeightStore
from trackway.learner.weight_proof import tensor_digests
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.trainer.loop.weight_publisher import IpcSender
from trackway.wire.weights import Verdict, WeightProof

pytestmark = [*MARKS, pytest.mark.extended]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    return WeightStore(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
async def server(
    environment: Path, base: Path, store: WeightStore, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmEngine]:
    settings = settings_of(
        base,
        tmp_path_factory.mktemp("transfer") / "vllm.log",
        weights_url=store.url,
        weights_transport="ipc",
    )
    if DEVICE == "cpu":
        settings.engine_args.extend(["--worker-extension-cls", "tests.vllm.file_transfer.Registered"])
        settings.engine_args.extend(["--weight-transfer-config", json.dumps({"backend": "file"})])
    async with started(VllmEngine(settings)) as engine:
        yield engine


def whole_proof(weights: Weights) -> WeightProof:
    return weights.proof.model_copy(update={"digests": tensor_digests(weights.folder), "dtype": "float32"})


def sender_for(store: WeightStore, learner: ModelInMemory, folder: Path) -> IpcSender:
    """Several chunks, of CUDA's memory where there is some."""
    if DEVICE == "cpu":
        memory = FileMemory(folder)
        return IpcSender(store, learner.as_learner(), memory.allocate, memory.share, chunk_bytes=20_000)

    def allocate(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=DEVICE)

    return IpcSender(store, learner.as_learner(), allocate, chunk_bytes=20_000)


async def test_a_version_is_taken_from_memory_and_proved_and_after_half_an_update_it_comes_from_the_store(
    server: VllmEngine, store: WeightStore, first: Weights, second: Weights, tmp_path: Path
) -> None:
    learner = ModelInMemory(first.folder)
    sender = sender_for(store, learner, tmp_path)
    await server.load_weights(first.folder, 1, whole_proof(first))
    assert server.stats().transferred_weights == 0  # the first ones of a server are the store's

    learner.take(second.folder)
    sender.offer(2, second.folder)
    await server.load_weights(second.folder, 2, whole_proof(second))
    made = await server.generate(PROMPT, GREEDY, "a")
    assert worst(made, second.model, GREEDY) < 1e-4
    assert [span.version for span in made.spans] == [2]
    assert (server.stats().transferred_weights, server.stats().weight_fallbacks) == (1, 0)
    assert server.judgement is not None and server.judgement.verdict is Verdict.PROVEN

    learner.take(first.folder)
    sender.offer(3, first.folder)
    offer = store.offered()
    assert offer is not None and len(offer.chunks) > 3
    last = offer.chunks[-1]
    broken = last.model_copy(update={"names": ["fails", *last.names[1:]]})
    store.offer(offer.model_copy(update={"chunks": [*offer.chunks[:-1], broken]}))
    await server.load_weights(first.folder, 3, whole_proof(first))
    assert worst(await server.generate(PROMPT, GREEDY, "b"), first.model, GREEDY) < 1e-4
    assert (server.stats().transferred_weights, server.stats().weight_fallbacks) == (1, 1)
    assert server.judgement.verdict is Verdict.PROVEN

    learner.take(second.folder)
    sender.offer(4, second.folder)
    await server.load_weights(second.folder, 4, whole_proof(second))
    assert worst(await server.generate(PROMPT, GREEDY, "c"), second.model, GREEDY) < 1e-4
    assert (server.stats().transferred_weights, server.stats().weight_fallbacks) == (2, 1)


async def test_a_server_without_weight_transfer_reads_the_store_and_says_why(
    engine: VllmEngine, first: Weights, second: Weights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, memory, learner = WeightStore(str(tmp_path / "store")), FileMemory(tmp_path), ModelInMemory(second.folder)
    IpcSender(store, learner.as_learner(), memory.allocate, memory.share).offer(2, second.folder)
    own = {"engine_url": engine.http.base_url, "weights_url": store.url, "weights_transport": "ipc"}
    async with started(VllmEngine(engine.settings.model_copy(update=own))) as attached:
        await attached.load_weights(first.folder, 1, first.proof)
        await attached.load_weights(second.folder, 2, second.proof)
        assert worst(await attached.generate(PROMPT, GREEDY, "a"), second.model, GREEDY) < 1e-4
        assert (attached.version, attached.stats().weight_fallbacks) == (2, 1)
    assert "Weight transfer not configured" in caplog.text
