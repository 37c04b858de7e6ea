"""Tiny tied models that vLLM's CPU build can run, what transformers says about them, and engines on them."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trackway.rollout.engines.engine import Generation
from trackway.rollout.engines.vllm import VllmEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Canary

ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"
VOCAB = 96
EOS = 30
"""A token that the model of seed 0 makes often."""
MAX_LEN = 1024
BLOCK = 128
"""Tokens of a KV block on the CPU: vLLM reuses prefixes of whole blocks only."""

PROMPT = [11, 12, 13]
LONG = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Weights(NamedTuple):
    """One published set of weights, and what transformers knows about it."""

    folder: Path
    model: PreTrainedModel
    canary: Canary


def build(folder: Path, seed: int) -> Path:
    """A random Qwen3 with tied embeddings, saved as transformers saves it: without `lm_head.weight`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's attention on the CPU takes
        max_position_embeddings=MAX_LEN,
        eos_token_id=EOS,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # transformers starts them at 1, which hides errors
    model.save_pretrained(folder)
    return folder


def published(base: Path, folder: Path) -> Path:
    """The weights of `base` as our trainer publishes them: `lm_head.weight` spelled out."""
    folder.mkdir()
    weights = load_file(base / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


def load(folder: Path) -> PreTrainedModel:
    """The model of a folder for transformers, in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs_of(
    model: PreTrainedModel, tokens: list[int], start: int, params: SamplingParams | None = None
) -> list[float]:
    """Transformers' logprobs of tokens[start:] under the distribution that they were drawn from."""
    params = params or SamplingParams()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
    logits = logits / (params.temperature or 1.0)
    if params.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        outside = (before >= params.top_p).scatter(1, order, before >= params.top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[start:])[:, None])[:, 0].tolist()


def worst(generation: Generation, model: PreTrainedModel, params: SamplingParams, prompt: list[int] = PROMPT) -> float:
    """The largest difference between an engine's logprobs and transformers'."""
    want = logprobs_of(model, [*prompt, *generation.token_ids], len(prompt), params)
    return max(abs(ours - theirs) for ours, theirs in zip(generation.logprobs, want, strict=True))


def canary_of(model: PreTrainedModel, shift: float = 0.0) -> Canary:
    """What a publisher says about its model; `shift` makes it wrong."""
    tokens = list(range(3, 35))
    return Canary(token_ids=tokens, logprobs=[lp + shift for lp in logprobs_of(model, tokens, 1)], tolerance=1e-3)


def settings_of(model_path: Path, log: Path, **more: Any) -> RolloutSettings:
    """Settings of a replica with vLLM beside it."""
    return RolloutSettings(
        engine="vllm",
        engine_python=ENVIRONMENT / "bin" / "python",
        engine_log=log,
        model_path=model_path,
        device="cpu",
        enforce_eager=True,  # without torch.compile: the start takes half as long
        max_num_seqs=4,
        max_queue=2,
        **more,
    )


@asynccontextmanager
async def started(settings: RolloutSettings) -> AsyncIterator[VllmEngine]:
    """An engine that runs; its server ends with the block."""
    engine = VllmEngine(settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def busy(engine: VllmEngine) -> None:
    """Return when vLLM is at the requests that were sent before: one that comes after them has got some tokens.

    Its counters do not serve for that: a server that generates may take seconds to tell them.
    """
    await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        async for _ in engine.stream([9], SamplingParams(max_tokens=8, ignore_eos=True), "probe"):
            pass


async def idle(engine: VllmEngine) -> None:
    """Return when vLLM itself makes no tokens any more: its gauge of running requests stands still then, too."""
    async with asyncio.timeout(20):
        before = -1.0
        while (now := (await metrics(engine))["generation_tokens_total"]) != before:
            before = now
            await asyncio.sleep(0.3)


async def metrics(engine: VllmEngine) -> dict[str, float]:
    """vLLM's own counters, by name."""
    text = (await engine.http.get("/metrics"))["text"]
    found = re.findall(r"^vllm:(\w+){[^}]*} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
