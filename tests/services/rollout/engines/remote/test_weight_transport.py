"""Versions that travel from a publisher to a vLLM server through shared memory, and by the store when that fails."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.services.rollout.engine_runs import started, watching
from tests.services.rollout.engines.remote.fake_server import serving
from tests.services.rollout.engines.remote.file_memory import FileMemory
from tests.services.rollout.engines.remote.model_in_memory import ModelInMemory
from tests.services.rollout.engines.remote.vllm_transfer_fake import PHASES, Fake, make_app, write_model
from trackway.clients.weights import WeightStore
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.settings import RolloutSettings
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.system import free_port
from trackway.trainer.loop.weight_publisher import IpcSender, Publisher
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import SharedMemory, Verdict

pytestmark = pytest.mark.anyio


class Run:
    """A publisher, and a replica that follows it on the same machine."""

    def __init__(self, tmp_path: Path, fake: Fake, engine: VllmEngine, watcher: WeightWatcher) -> None:
        self.fake, self.engine, self._watcher = fake, engine, watcher
        self.store = WeightStore(str(tmp_path / "store"))
        self.learner = ModelInMemory(tmp_path / "base")
        memory = FileMemory(tmp_path)
        self.exported: list[SharedMemory] = []

        def share(buffer: torch.Tensor) -> SharedMemory:
            self.exported.append(memory.share(buffer))
            return self.exported[-1]

        # Two tensors to a buffer: 512 + 8 bytes, and the head alone.
        self.sender = IpcSender(self.store, self.learner.as_learner(), memory.allocate, share, 600)
        self.publisher = Publisher(
            self.store, self.learner.as_learner(), "run", "0" * 16, tmp_path / "export", 9, sender=self.sender
        )

    async def publish(self, seed: int) -> list[str]:
        """Returns the calls of the server by which the replica loaded and proved the version."""
        self.learner.take(write_model(self.learner.folder.parent / f"model-{seed}", seed))
        del self.fake.calls[:]
        version = self.publisher.publish()
        await self._watcher.catch_up(version, 20.0)
        assert self.engine.version == version
        assert self.engine.judgement is not None
        assert self.engine.judgement.verdict is Verdict.PROVEN
        want = load_file(self.learner.folder / "model.safetensors")
        assert all(torch.equal(self.fake.tensors[name], tensor) for name, tensor in want.items())
        return [call for call in self.fake.calls if call in (*PHASES, "/collective_rpc")]

    @property
    def counts(self) -> tuple[int, int]:
        """Versions transferred, and those that fell back."""
        stats = self.engine.stats()
        return stats.transferred_weights, stats.weight_fallbacks


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """After its first version, which a new server reads from the store."""
    base = write_model(tmp_path / "base", 0)
    fake = Fake(base)
    async with serving(make_app(fake), free_port()) as url:
        settings = RolloutSettings(
            engine="vllm",
            engine_url=url,
            model_path=base,
            weights_url=str(tmp_path / "store"),
            weights_transport="ipc",
            dtype="bfloat16",
        )
        store = WeightStore(str(tmp_path / "store"))
        async with (
            started(VllmEngine(settings)) as engine,
            watching(engine, store, tmp_path / "cache") as watcher,
        ):
            run = Run(tmp_path, fake, engine, watcher)
            assert await run.publish(1) == ["/collective_rpc"]
            yield run
            run.publisher.close()
    assert fake.crimes == []


async def test_a_version_goes_through_the_phases_with_names_types_shapes_and_bytes(run: Run) -> None:
    assert await run.publish(2) == [PHASES[0], PHASES[1], PHASES[2], PHASES[2], PHASES[3]]
    assert run.fake.updates == [
        {
            "names": ["lm_head.weight"],
            "dtype_names": ["bfloat16"],
            "shapes": [[64, 4]],
            "tensor_sizes": [512],
        },
        {
            "names": ["model.embed_tokens.weight", "model.norm.weight"],
            "dtype_names": ["bfloat16"] * 2,
            "shapes": [[64, 4], [4]],
            "tensor_sizes": [512, 8],
        },
    ]
    assert run.counts == (1, 0)


async def test_memory_is_exported_once_for_all_versions(run: Run) -> None:
    offers = []
    for seed in (2, 3, 4):
        await run.publish(seed)
        offers.append([chunk.memory for chunk in (run.store.offered() or pytest.fail("no offer")).chunks])

    assert len(run.exported) == len(offers[0]) == 2
    assert offers == [offers[0]] * 3
    assert run.counts == (3, 0)


async def test_a_generation_is_sampled_as_it_was_asked(run: Run) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.8, top_k=11, seed=5, max_tokens=9, stop_token_ids=[3])
    await run.engine.generate([1, 2], params, "r")

    sampled = run.fake.sampled[-1]
    asked = params.model_dump(include={"temperature", "top_p", "top_k", "seed", "max_tokens"})
    assert {name: sampled[name] for name in asked} == asked
    assert 3 in sampled["stop_token_ids"]


@pytest.mark.parametrize("phase", PHASES)
async def test_a_failure_in_any_phase_takes_the_same_version_from_the_store(run: Run, phase: str) -> None:
    run.fake.fail[phase] = 500
    calls = await run.publish(2)
    assert calls[-1] == "/collective_rpc"
    assert run.counts == (0, 1)

    assert (await run.publish(3))[-1] == PHASES[3]
    assert run.counts == (1, 1)


async def test_tensors_that_fail_their_proof_are_taken_from_the_store(run: Run) -> None:
    run.fake.corrupts = True
    calls = await run.publish(2)
    assert calls[-2:] == ["/collective_rpc"] * 2  # the version before, and then this one
    assert run.counts == (1, 1)


async def test_a_server_without_the_routes_is_named_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.fake.routes = False
    for seed in (2, 3):
        assert await run.publish(seed) == [PHASES[0], "/collective_rpc"]
    assert run.counts == (0, 2)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "weights version 2 is loaded from the store" in said[0]


async def test_an_offer_that_ends_during_the_transfer_is_not_trusted(run: Run) -> None:
    finish = run.fake.transfer

    def withdrawn(route: str, body: dict[str, object]) -> None:
        finish(route, body)
        if route == PHASES[3] and run.store.offered() is not None:
            run.store.withdraw()

    run.fake.transfer = withdrawn
    calls = await run.publish(2)
    assert calls[-1] == "/collective_rpc"
    assert run.counts == (0, 1)


async def test_tensors_that_were_not_published_are_not_offered(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    publish = run.learner.export_to_engines
    run.learner.export_to_engines = lambda folder: (publish(folder), run.learner.tensors.pop("model.norm.weight"))[0]
    assert await run.publish(2) == ["/collective_rpc"]
    assert run.store.offered() is None
    assert "expected the learner to have the published tensors" in caplog.text


async def test_an_offer_ends_with_its_publisher_and_before_the_next_version_is_made(run: Run) -> None:
    await run.publish(2)
    seen: list[object] = []
    export = run.learner.export_to_engines
    run.learner.export_to_engines = lambda folder: (seen.append(run.store.offered()), export(folder))[1]
    await run.publish(3)
    offer = run.store.offered()
    run.publisher.close()
    assert seen == [None]
    assert offer is not None
    assert offer.version == 3
    assert run.store.offered() is None


@pytest.mark.parametrize(
    ("more", "got"),
    [
        ({"engine": "torch"}, "engine=torch"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"max_lora_rank": 8}, "max_lora_rank=8"),
        ({"weights_url": "s3://bucket/weights"}, "weights_url=s3://bucket/weights"),
        ({"weights_url": None}, "weights_url=None"),
    ],
)
def test_a_replica_that_cannot_take_weights_from_memory_is_refused(more: dict[str, object], got: str) -> None:
    settings = {"engine": "vllm", "weights_url": "/weights", "weights_transport": "ipc", **more}
    with pytest.raises(ValidationError, match=f"got {got}; set weights_transport=store"):
        RolloutSettings(**settings)  # pyright: ignore[reportArgumentType]
