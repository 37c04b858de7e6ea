"""The embedded engine against transformers: tokens per second, side by side with what the machine could do.

    .venv/bin/python benchmarks/engine.py [--quick]
    .venv/bin/python benchmarks/engine.py --policies      two policies, which take turns, against one with both loads

A random Qwen3 of 5.0 million parameters, float32, one thread, temperature 1, logprobs of the sampled tokens. The
contenders take turns on the same prompts and lengths; each cell shows the best round of each, since other work on the
machine only ever makes a round slower.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from engine_contenders import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    ContinuousBatching,
    Cost,
    Load,
    Ours,
    PaddedGenerate,
    Run,
    Sessions,
    load_of,
    random_model,
)

_FLOAT = 4


class Machine:
    """What one thread of this machine reads and multiplies, measured."""

    def __init__(self) -> None:
        data, square = torch.ones(64 * 2**20), torch.ones(1024, 1024)
        self.bytes_per_s = data.numel() * _FLOAT / best_of(5, lambda: data.sum())
        self.flops_per_s = 2 * 1024**3 / best_of(20, lambda: square @ square)

    def bound(self, load: Load, concurrency: int) -> float:
        """Tokens per second if prefill were pure arithmetic and each decoding step its dearer part, all slots full."""
        attention = (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN
        layer, key_value = attention + 3 * HIDDEN * INTERMEDIATE, 2 * KV_HEADS * HEAD_DIM * HIDDEN
        head = VOCABULARY * HIDDEN
        prompt_tokens, made = sum(map(len, load.prompts)), sum(load.lengths)
        prefill = 2 * prompt_tokens * ((LAYERS - 1) * layer + key_value) / self.flops_per_s
        rows = min(concurrency, len(load.prompts))
        context = sum(len(p) + n / 2 for p, n in zip(load.prompts, load.lengths, strict=True)) / len(load.prompts)
        cache = rows * context * 2 * KV_HEADS * HEAD_DIM * LAYERS * _FLOAT
        weights = LAYERS * layer + head
        step = max(2 * rows * weights / self.flops_per_s, (weights * _FLOAT + cache) / self.bytes_per_s)
        return made / (prefill + made / rows * step)


def best_of(times: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    fastest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def cell(contenders: dict[str, Run], loads: list[Load], bound: float) -> str:
    """One row of the table: the best rate of each, ours over theirs, and the same for CPU seconds."""
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for load in loads:
        for name, run in contenders.items():
            cost = run(load)
            if cost.tokens != sum(load.lengths):
                raise RuntimeError(f"expected {sum(load.lengths)} tokens of {name}, got {cost.tokens}")
            costs[name].append(cost)
    rate = {name: max(cost.tokens / cost.wall_s for cost in each) for name, each in costs.items()}
    per_cpu = {name: max(cost.tokens / cost.cpu_s for cost in each) for name, each in costs.items()}
    others = [name for name in contenders if name != "ours"]
    shown = [f"{rate['ours']:6.0f}", *(f"{rate[o]:6.0f} ({rate['ours'] / rate[o]:4.2f}x)" for o in others)]
    cpu = " ".join(f"{per_cpu['ours'] / per_cpu[contender]:4.2f}x" for contender in others)
    return f"{' | '.join(shown)} | {cpu:>11} | {bound:6.0f}"


def print_policies(folder: Path, rng: random.Random) -> None:
    """Print the CPU seconds of two policies relative to one. Batches of both could save at most the difference."""
    for concurrency in (2, 16, 64):
        one, two = Ours(folder, concurrency), Ours(folder, concurrency, policies=2)
        pairs = [(one(load), two(load)) for load in (load_of(rng, concurrency, ragged=True) for _ in range(6))]
        ratios = sorted(together.cpu_s / alone.cpu_s for alone, together in pairs)
        middle = (ratios[2] + ratios[3]) / 2
        print(
            f"{concurrency} requests, half of each policy: {middle:.2f}x the CPU ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, concurrency 1 and 16 only")
    parser.add_argument("--policies", action="store_true", help="two policies against one, and nothing else")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    if arguments.policies:
        with tempfile.TemporaryDirectory() as name:
            random_model(Path(name))
            print_policies(Path(name), random.Random(1))
        return
    machine, rng = Machine(), random.Random(1)
    print(f"one thread: reads {machine.bytes_per_s / 1e9:.1f} GB/s, multiplies {machine.flops_per_s / 1e9:.0f} GFLOPS")
    print("tokens/s of  | ours   | generate       | cont. batching | CPU: 1x each | bound")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_model(folder)
        for lengths in ("equal", "ragged"):
            for concurrency in (1, 16) if quick else (1, 16, 64):
                contenders = {
                    "ours": Ours(folder, concurrency),
                    "generate": PaddedGenerate(model, concurrency),
                    "continuous batching": ContinuousBatching(model, concurrency),
                }
                count = max(4, concurrency if lengths == "equal" else 2 * concurrency)
                rounds = 1 if quick else {1: 4, 16: 2, 64: 1}[concurrency]
                loads = [load_of(rng, count, lengths == "ragged") for _ in range(rounds)]
                row = cell(contenders, loads, machine.bound(loads[0], concurrency))
                print(f"{lengths:6} {concurrency:5} | {row}", flush=True)
        shape = Sessions(groups=2 if quick else 8, samples=8)
        ours, prefilled = asyncio.run(shape.ours(folder, random.Random(2)))
        theirs, computed = shape.padded(model, random.Random(2))
        faster, cheaper = ours.rate / theirs.rate, theirs.cpu_s / ours.cpu_s
        print(
            f"{shape.groups} groups of {shape.samples} over {shape.turns} turns: ours {ours.rate:.0f} tokens/s, ",
            end="",
        )
        print(f"generate {theirs.rate:.0f} ({faster:.2f}x, CPU {cheaper:.2f}x); ", end="")
        print(f"prompt tokens computed: {prefilled} against {computed}")


if __name__ == "__main__":
    main()
