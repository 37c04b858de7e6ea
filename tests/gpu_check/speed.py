"""Tokens per second of engine and learner in bfloat16, and their share of what the device multiplies."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu_check.checks import LR, engine_of
from tests.gpu_check.model import Shape, prompts
from tests.services.rollout.planted_weights import batch
from tests.services.trainer.learner_settings import learner_config
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.trainer.learner.learner import Learner
from trackway.wire.rollout import SamplingParams


class Load:
    """Sequences and their lengths in tokens; fewer on a CPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.sequences = 64 if on_gpu else 8
        self.prompt, self.response = (256, 256) if on_gpu else (32, 32)
        self.rows = 32 if on_gpu else 8
        """Trajectories of an update."""
        self.micro_batch = 4
        self.square = 8192 if on_gpu else 512


def measure(shape: Shape, folder: Path, device: torch.device) -> dict[str, str]:
    """Figures by name."""
    load = Load(device)
    peak = _multiplied(load.square, device)
    tokens, seconds = asyncio.run(_generated(shape, folder, device, load))
    rate = tokens / seconds
    trained, step_s = _trained(shape, folder, device, load)
    trained_name = f"learner, {load.rows} trajectories of {load.prompt + load.response} tokens"
    figures = {
        f"bfloat16 product of two {load.square} x {load.square} matrices": f"{peak / 1e12:.3g} TFLOP/s",
        f"engine, {load.sequences} sequences of {load.prompt} + {load.response} tokens": f"{rate:.0f} tokens/s",
        f"engine, of that product (2 x {shape.parameters / 1e6:.0f}M FLOP a token)": _share(
            2 * shape.parameters * rate, peak
        ),
        trained_name: f"{trained / step_s:.0f} tokens/s",
        "learner, of that product (MFU; logprobs and proof passes count as time only)": _share(
            6 * shape.parameters * trained / step_s, peak
        ),
    }
    if device.type == "cuda":
        figures["most memory of the learner"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return figures


def _share(flops: float, peak: float) -> str:
    return f"{flops / peak:.1%}"


def _multiplied(size: int, device: torch.device) -> float:
    """FLOP per second of the fastest of ten products."""
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / min(_seconds(lambda: square @ square, device) for _ in range(10))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


async def _generated(shape: Shape, folder: Path, device: torch.device, load: Load) -> tuple[int, float]:
    """Tokens and seconds of a batch, after one that warms up."""
    engine = engine_of(folder, device, "bfloat16", load.sequences)
    await engine.start()
    try:
        await _batch(engine, prompts(shape, 4, load.prompt), 8)
        began = time.perf_counter()
        tokens = await _batch(engine, prompts(shape, load.sequences, load.prompt), load.response)
        return tokens, time.perf_counter() - began
    finally:
        await engine.stop()


async def _batch(engine: TorchEngine, asked: list[list[int]], length: int) -> int:
    requests = [
        engine.generate(prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=n), str(n))
        for n, prompt in enumerate(asked)
    ]
    return sum(len(made.token_ids) for made in await asyncio.gather(*requests))


def _trained(shape: Shape, folder: Path, device: torch.device, load: Load) -> tuple[int, float]:
    """Tokens and seconds of an update, after one that warms up."""
    texts = prompts(shape, load.rows, load.prompt + load.response)
    used = batch([(ids[: load.prompt], ids[load.prompt :]) for ids in texts], good=1)
    config = learner_config(
        folder, device=str(device), dtype="bfloat16", lr=LR, remove_padding=True, micro_batch_size=load.micro_batch
    )
    learner = Learner(config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    learner.update(used)
    return sum(map(len, texts)), _seconds(lambda: learner.update(used), device)
