"""The embedded engine against transformers' `generate`: sampled tokens per CPU second, in one run.

    .venv/bin/python benchmarks/engine.py

A step of the demo: 96 rollouts of about 41 prompt tokens and 8 to 12 new ones, a random Qwen3 of the demo's size, one
thread, float32. transformers gets equal lengths and no logprobs of its own, which flatters it. Best of several rounds,
since other work on the machine only ever makes a round slower.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from trackway.rollout.settings import RolloutSettings
from trackway.rollout.torch_engine import TorchEngine
from trackway.wire.rollout import SamplingParams

VOCABULARY, ROLLOUTS, GROUPS, PROMPT = 480, 96, 12, 41
ROUNDS = 8
LENGTHS = [random.Random(0).randint(8, 12) for _ in range(ROLLOUTS)]

Prompts = Callable[[random.Random], list[list[int]]]


def distinct(rng: random.Random) -> list[list[int]]:
    """96 different prompts."""
    return [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(ROLLOUTS)]


def grouped(rng: random.Random) -> list[list[int]]:
    """12 prompts, 8 rollouts each, as in GRPO."""
    prompts = distinct(rng)[:GROUPS]
    return [prompt for prompt in prompts for _ in range(ROLLOUTS // GROUPS)]


def random_model(folder: Path) -> PreTrainedModel:
    """A model of the demo's shape, saved for the engine."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        intermediate_size=192,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


async def engine_rate(folder: Path, make: Prompts) -> float:
    """Sampled tokens per CPU second of the embedded engine."""
    engine = TorchEngine(RolloutSettings(model_path=folder, max_num_seqs=128, device="cpu"))
    await engine.start()
    rng, best = random.Random(1), 0.0
    for _ in range(ROUNDS):
        prompts = make(rng)
        params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=n) for n, length in enumerate(LENGTHS)]
        started = time.process_time()
        made = await asyncio.gather(
            *(engine.generate(*pair, str(n)) for n, pair in enumerate(zip(prompts, params, strict=True)))
        )
        best = max(best, sum(len(one.token_ids) for one in made) / (time.process_time() - started))
    await engine.stop()
    return best


def transformers_rate(model: PreTrainedModel, make: Prompts) -> float:
    """Sampled tokens per CPU second of `generate` on one static batch, logprobs included."""
    rng, best = random.Random(1), 0.0
    for _ in range(ROUNDS):
        prompts = torch.tensor(make(rng))
        length = max(LENGTHS)
        started = time.process_time()
        with torch.inference_mode():
            out = model.generate(  # pyright: ignore[reportCallIssue]  a mixin's method
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                max_new_tokens=length,
                min_new_tokens=length,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            torch.log_softmax(torch.stack(out.logits, 1), -1).gather(-1, out.sequences[:, PROMPT:, None])
        best = max(best, sum(LENGTHS) / (time.process_time() - started))
    return best


def main() -> None:
    """Print both rates and their ratio, for distinct and for grouped prompts."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder))
        for make in (distinct, grouped):
            ours, theirs = asyncio.run(engine_rate(Path(folder), make)), transformers_rate(model, make)
            print(
                f"{make.__name__:9} engine {ours:6.0f}  transformers {theirs:6.0f} tokens/CPU s  {ours / theirs:.2f}x"
            )


if __name__ == "__main__":
    main()
