"""What `benchmarks/engine.py` compares: each contender continues the same prompts to the same lengths."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config
from transformers.generation.continuous_batching import ContinuousBatchingManager

from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import SamplingParams

VOCABULARY, LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 6, 256, 768, 4, 2, 64
MOST = 512
"""Longest prompt plus continuation."""
_PAGE = 32


class Load(NamedTuple):
    """Prompts, and how many tokens each is continued by."""

    prompts: list[list[int]]
    lengths: list[int]


class Cost(NamedTuple):
    """What one run of a contender took, and what it must have made."""

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Tokens per second of wall time."""
        return self.tokens / self.wall_s


Run = Callable[[Load], Cost]


def random_model(folder: Path) -> PreTrainedModel:
    """A Qwen3 of 5.0 million parameters, saved for the engine."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def load_of(rng: random.Random, count: int, ragged: bool) -> Load:
    """Equal: prompts of 200, continued by 64. Ragged: 50 to 350, by 8 to 120; the same means."""
    sizes = [rng.randint(50, 350) if ragged else 200 for _ in range(count)]
    lengths = [rng.randint(8, 120) if ragged else 64 for _ in range(count)]
    return Load([[rng.randrange(VOCABULARY) for _ in range(size)] for size in sizes], lengths)


def timed(work: Callable[[], int]) -> Cost:
    """Run `work`, which returns how many tokens it made."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return Cost(tokens, time.perf_counter() - wall, time.process_time() - cpu)


def settings_of(folder: Path, slots: int) -> RolloutSettings:
    """An engine with this many slots and no bound on its queue that would matter."""
    return RolloutSettings(
        model_path=folder, max_num_seqs=slots, max_queue=10_000, max_model_len=MOST, device="cpu", threads=1
    )


class Ours:
    """The embedded engine with `concurrency` slots, asked for everything at once. With `policies`, an engine each."""

    def __init__(self, folder: Path, concurrency: int, policies: int = 1) -> None:
        self._settings, self._policies = settings_of(folder, concurrency), policies

    def __call__(self, load: Load) -> Cost:
        """Fresh engines, so that nothing is reused from one run to the next."""
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> Cost:
        engines = [TorchEngine(self._settings) for _ in range(self._policies)]
        for engine in engines:
            await engine.start()
        wall, cpu = time.perf_counter(), time.process_time()
        made = await asyncio.gather(
            *(
                engines[n % len(engines)].generate(
                    prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=n), str(n)
                )
                for n, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
            )
        )
        cost = Cost(
            sum(len(generated.logprobs) for generated in made), time.perf_counter() - wall, time.process_time() - cpu
        )
        for engine in engines:
            await engine.stop()
        return cost


class PaddedGenerate:
    """transformers' `generate` on static batches of `concurrency`, padded on the left, each until its longest ends."""

    def __init__(self, model: PreTrainedModel, concurrency: int) -> None:
        self._model, self._size = model, concurrency

    def __call__(self, load: Load) -> Cost:
        """Batch after batch, in the order given; tokens beyond a request's length do not count."""
        starts = range(0, len(load.prompts), self._size)
        return timed(lambda: sum(self._batch(load, slice(start, start + self._size)) for start in starts))

    def _batch(self, load: Load, part: slice) -> int:
        prompts, lengths = load.prompts[part], load.lengths[part]
        width, longest = max(map(len, prompts)), max(lengths)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            out = self._model.generate(  # pyright: ignore[reportCallIssue]  a mixin's method
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            torch.log_softmax(torch.stack(out.logits, 1), -1).gather(-1, out.sequences[:, width:, None]).tolist()
        return sum(lengths)


class ContinuousBatching:
    """transformers' own continuous batching with `concurrency` requests at a time; each request has its length."""

    def __init__(self, model: PreTrainedModel, concurrency: int) -> None:
        self._model, self._size = model, concurrency

    def __call__(self, load: Load) -> Cost:
        """All requests at once through a manager that has started and warmed up."""
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=self._size * (MOST // _PAGE),
            max_batch_tokens=max(MOST, self._size),
            max_requests_per_batch=self._size,
            return_logprobs=True,
            use_cuda_graph=False,
        )
        sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(load.lengths), eos_token_id=-1)
        with self._model.continuous_batching_context_manager(  # pyright: ignore[reportCallIssue]
            generation_config=sampling, continuous_batching_config=config
        ) as manager:
            return timed(lambda: self._run(manager, load))

    def _run(self, manager: ContinuousBatchingManager, load: Load) -> int:
        for n, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
            manager.add_request(prompt, request_id=str(n), max_new_tokens=length)
        results = [manager.get_result(timeout=300) for _ in load.prompts]
        return sum(len(result.logprobs) for result in results if result is not None)


class Sessions(NamedTuple):
    """GRPO over turns: `groups` prompts, `samples` sessions of each, every turn appending an observation."""

    groups: int
    samples: int
    turns: int = 3
    observation: int = 30

    def starts(self, rng: random.Random) -> list[list[int]]:
        """The first prompt of each session."""
        prompts = load_of(rng, self.groups, ragged=False).prompts
        return [prompt for prompt in prompts for _ in range(self.samples)]

    async def ours(self, folder: Path, rng: random.Random) -> tuple[Cost, int]:
        """Each session at its own pace; also how many prompt tokens were computed."""
        starts = self.starts(rng)
        engine = TorchEngine(settings_of(folder, len(starts)))
        await engine.start()
        lengths = [[rng.randint(8, 56) for _ in range(self.turns)] for _ in starts]

        async def session(number: int) -> int:
            tokens, made = starts[number], 0
            for turn, length in enumerate(lengths[number]):
                params = SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
                done = await engine.generate(tokens, params, f"{number}-{turn}")
                made += len(done.token_ids)
                tokens = [*tokens, *done.token_ids, *range(self.observation)]
            return made

        wall, cpu = time.perf_counter(), time.process_time()
        made = sum(await asyncio.gather(*map(session, range(len(starts)))))
        cost = Cost(made, time.perf_counter() - wall, time.process_time() - cpu)
        prefilled = engine.stats().prefilled_tokens
        await engine.stop()
        return cost, prefilled

    def padded(self, model: PreTrainedModel, rng: random.Random) -> tuple[Cost, int]:
        """All sessions in step, each turn one static batch until its longest ends, computed from its start."""
        prompts = self.starts(rng)
        lengths = [[rng.randint(8, 56) for _ in range(self.turns)] for _ in prompts]
        contender, total, computed = PaddedGenerate(model, len(prompts)), Cost(0, 0.0, 0.0), 0
        for turn in range(self.turns):
            now = [each[turn] for each in lengths]
            cost = contender(Load(prompts, now))
            total = Cost(total.tokens + cost.tokens, total.wall_s + cost.wall_s, total.cpu_s + cost.cpu_s)
            computed += sum(map(len, prompts))
            more = [[0] * length + [*range(self.observation)] for length in now]
            prompts = [prompt + new for prompt, new in zip(prompts, more, strict=True)]
        return total, computed
