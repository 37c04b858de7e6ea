"""Tokens per second of engine and learner in bfloat16, and their share of what the device multiplies.

`python -m tests.gpu_check.speed PYTHON DEVICE` measures vLLM instead, with the interpreter of its environment: the same
requests through Trackway's engine and straight to its server, printed as JSON.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import torch
from pydantic_core import to_json

from tests.gpu_check.checks import LR, engine_of
from tests.gpu_check.model import LARGE, SMALL, Shape, prompts
from tests.services.rollout.planted_weights import batch
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.rollout.engines.protocol import Engine
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.settings import RolloutSettings
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


async def _batch(engine: Engine, asked: list[list[int]], length: int) -> int:
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


async def beside_vllm(python: Path, device: torch.device) -> dict[str, float]:
    """Tokens per second of vLLM through Trackway's engine, and of the same requests sent to its server alone."""
    load, shape = Load(device), LARGE if device.type == "cuda" else SMALL
    with tempfile.TemporaryDirectory() as name:
        settings = RolloutSettings(
            engine="vllm",
            engine_python=python,
            engine_log=Path(name, "vllm.log"),
            model_path=shape.write(Path(name, "model")),
            device="cuda" if device.type == "cuda" else "cpu",
            dtype="bfloat16",
            max_num_seqs=load.sequences,
            max_model_len=1024,
        )
        engine = VllmEngine(settings)
        try:
            await engine.start()
            asked = prompts(shape, load.sequences, load.prompt)
            async with httpx.AsyncClient(base_url=engine.http.base_url, timeout=600.0, trust_env=False) as alone:

                async def bare(prompt: list[int], seed: int) -> int:
                    sampling = {"max_tokens": load.response, "ignore_eos": True, "seed": seed, "detokenize": False}
                    body = {"token_ids": prompt, "sampling_params": sampling}
                    answer = (await alone.post("/inference/v1/generate", json=body)).raise_for_status().json()
                    return sum(len(choice["token_ids"]) for choice in answer["choices"])

                async def bare_batch() -> int:
                    return sum(await asyncio.gather(*(bare(prompt, n) for n, prompt in enumerate(asked))))

                async def own_batch() -> int:
                    return await _batch(engine, asked, load.response)

                await own_batch()
                return {"vLLM alone": await _rate(bare_batch), "through Trackway": await _rate(own_batch)}
        finally:
            await engine.stop()


async def _rate(work: Callable[[], Awaitable[int]]) -> float:
    """Tokens per second of the faster of two batches."""
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        tokens = await work()
        best = max(best, tokens / (time.perf_counter() - began))
    return round(best, 1)


if __name__ == "__main__":
    rates = asyncio.run(beside_vllm(Path(sys.argv[1]), torch.device(sys.argv[2])))
    print(to_json({"tokens per second": rates}).decode())
