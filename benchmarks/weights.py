"""What a publication of weights costs: bytes, seconds to publish, to fetch and to load, and the pause of generation.

    .venv/bin/python benchmarks/weights.py [--model tiny|135m|both]

Two models in bfloat16: the demo's, and a random one in the shape of SmolLM2-135M. The store is an object store in this
process's memory, so that a fetch copies but waits for no network. Version 1 is published whole, version 2 whole and as
a delta, after a step that moves each float32 weight by the learning rate, up or down, as AdamW's first step does; RL
takes smaller ones. The adapter is LoRA of rank 16 on all linear layers.

`fetch` ends with a verified folder: sha256 of whole files, for a delta with its application to the version before.
`load` is the embedded engine's, in float32 on one thread, with a proof of one token: reading, for an adapter also
merging. `gap` is the longest time between two tokens of a stream that runs meanwhile, beside that of the same stream
before, and `swap` the part of the load for which generation stands still.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from trackway.clients.weights import WeightStore, WholeWeights
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.engines.torch.core import EngineCore
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Probe, WeightManifest, WeightProof

RATES = (1e-6, 1e-5)
"""Learning rates: RL's usual one, and ten times that."""
RANK = 16
PROOF = WeightProof(probes=[Probe(token_ids=[5, 6], positions=[1], logprobs=[-1.0])], tolerance=100.0)
"""A proof over two tokens, which takes almost no time to check."""


class Timed(NamedTuple):
    """What a version cost."""

    name: str
    megabytes: float
    publish_s: float
    fetch_s: float
    load_s: float
    gap_s: float
    idle_gap_s: float
    swap_s: float


def smol() -> PreTrainedModel:
    """Random weights in the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=2048, initializer_range=0.0417))


def save(model: PreTrainedModel, folder: Path) -> Path:
    """The model in bfloat16, as a run publishes it."""
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model.save_pretrained(folder, state_dict=weights)
    return folder


def step(model: PreTrainedModel, rate: float) -> None:
    """Moves each weight by the rate."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rate * torch.randn_like(parameter).sign()


def adapter(model: PreTrainedModel, folder: Path) -> Path:
    """An adapter of the model whose B is not zero."""
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(str(folder))
    return folder


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stored(manifest: WeightManifest) -> float:
    """Megabytes in the store."""
    files = manifest.files if manifest.delta is None else manifest.delta.files
    return sum(file.size for file in files) / 1e6


class Replica:
    """An embedded engine that generates while it loads."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.swap_s = 0.0

    async def longest_gap(self, work: Callable[[], object] | None) -> tuple[float, float]:
        """Seconds of the work, and of the longest wait for a token meanwhile; without work over ten tokens."""
        arrivals: list[float] = []
        limit = self._engine.max_len - 8

        async def listen() -> None:
            params = SamplingParams(max_tokens=limit, ignore_eos=True, seed=1)
            async for _ in self._engine.stream([5, 6, 7], params, "stream"):
                arrivals.append(time.perf_counter())  # noqa: PERF401  the count is read meanwhile

        listening = asyncio.create_task(listen())
        while len(arrivals) < 3:
            await asyncio.sleep(0.005)
        began, seen = time.perf_counter(), len(arrivals)
        if work is not None:
            await asyncio.to_thread(work) if not asyncio.iscoroutinefunction(work) else await work()
        ended = time.perf_counter()
        while len(arrivals) < seen + 10:
            await asyncio.sleep(0.005)
        await self._engine.abort("stream")
        await listening
        times = [at for at in arrivals if at >= began - 1.0]
        return ended - began, max(later - earlier for earlier, later in pairwise(times))


async def measure(name: str, replica: Replica, engine: TorchEngine, store: WeightStore, version: int, cache: Path,
                  publish_s: float) -> Timed:  # fmt: skip
    """Fetches and loads a published version under a stream."""
    _, idle = await replica.longest_gap(None)
    fetch_s, gap_of_fetch = await replica.longest_gap(lambda: store.fetch(version, cache))

    async def load() -> None:
        await engine.load_weights(cache / str(version), version, PROOF)

    load_s, gap_of_load = await replica.longest_gap(load)
    gap = max(gap_of_fetch, gap_of_load)
    return Timed(name, stored(store.manifest(version)), publish_s, fetch_s, load_s, gap, idle, replica.swap_s)


async def compare(name: str, model: PreTrainedModel, root: Path) -> None:
    """One model's rows."""
    torch.set_num_threads(1)
    first = save(model, root / "first")
    settings = RolloutSettings(model_path=first, device="cpu", threads=1, max_num_seqs=2, max_model_len=2048)
    engine = TorchEngine(settings)
    replica = Replica(engine)
    swap = EngineCore.swap

    def timed(self: EngineCore, *given: object) -> None:
        replica.swap_s = seconds(lambda: swap(self, *given))  # pyright: ignore[reportArgumentType]

    EngineCore.swap = timed  # pyright: ignore[reportAttributeAccessIssue]
    await engine.start()
    original = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    rows: list[Timed] = []
    for rate in RATES:
        model.load_state_dict(original)
        step(model, rate)
        second = save(model, root / f"second-{rate}")
        for kind in ("whole", "delta"):
            store, cache = WeightStore(f"memory://{name}-{rate}-{kind}"), root / f"cache-{rate}-{kind}"
            base = WholeWeights(store.publish(1, "run", first, PROOF), first)
            store.fetch(1, cache)
            publish_s = seconds(
                lambda store=store, base=base, kind=kind, second=second: store.publish(
                    2, "run", second, PROOF, base=base if kind == "delta" else None
                )
            )
            if kind == "whole" and rate != RATES[0]:
                continue
            label = kind if kind == "whole" else f"delta, lr {rate:g}"
            rows.append(await measure(label, replica, engine, store, 2, cache, publish_s))
    model.load_state_dict(original)
    store = WeightStore(f"memory://{name}-adapter")
    folder = adapter(model, root / "adapter")
    (folder / "README.md").unlink(missing_ok=True)
    publish_s = seconds(lambda: store.publish(2, "run", folder, PROOF))
    rows.append(await measure(f"adapter, rank {RANK}", replica, engine, store, 2, root / "cache-adapter", publish_s))
    await engine.stop()
    EngineCore.swap = swap
    print(f"{name}: what | MB | of whole | publish s | fetch s | load s | longest gap ms (before) | swap ms")
    for row in rows:
        share = row.megabytes / rows[0].megabytes
        print(
            f"{row.name} | {row.megabytes:.3f} | {share:.1%} | {row.publish_s:.2f} | {row.fetch_s:.2f} | "
            f"{row.load_s:.2f} | {1000 * row.gap_s:.0f} ({1000 * row.idle_gap_s:.0f}) | {1000 * row.swap_s:.2f}",
            flush=True,
        )


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "135m", "both"), default="both")
    chosen = parser.parse_args().model
    disable_progress_bar()
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "tiny": lambda: AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32),
        "135m": smol,
    }
    for name, build in models.items():
        if chosen in (name, "both"):
            with tempfile.TemporaryDirectory() as root:
                asyncio.run(compare(name, build(), Path(root)))


if __name__ == "__main__":
    main()
