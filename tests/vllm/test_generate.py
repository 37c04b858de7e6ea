"""Generation by a real vLLM: ids in and out, logprobs, stops, seeds, streams, bounds, cuts, pauses."""

import asyncio

import pytest

from tests.servers.generation import *  # noqa: F403
from tests.vllm.vllm_runs import (
    GREEDY,
    LONG,
    MARKS,
    MAX_LEN,
    PROMPT,
    SHORT,
    Weights,
    busy,
    slowed,
    worst,
)
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.rollout import SamplingParams

pytestmark = MARKS


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60, ignore_eos=True, seed=1),
        SamplingParams(max_tokens=60, ignore_eos=True, seed=2, temperature=0.7, top_p=0.9, top_k=20),
        SamplingParams(max_tokens=60, ignore_eos=True, seed=3, temperature=1.3, top_p=0.8),
        GREEDY,
    ],
    ids=["plain", "cool-top-p-top-k", "hot-top-p", "greedy"],
)
async def test_logprobs_are_those_of_the_sampling_distribution(
    engine: VllmEngine, first: Weights, params: SamplingParams
) -> None:
    made = await engine.generate(PROMPT, params, "a")
    assert (made.finish_reason, len(made.token_ids)) == ("length", params.max_tokens)
    assert worst(made, first.model, params) < 1e-4
    assert [(span.version, span.start, span.end) for span in made.spans] == [(engine.version, 0, params.max_tokens)]


async def test_more_seeded_prompts_than_a_step_takes_do_not_end_the_server(engine: VllmEngine, first: Weights) -> None:
    prompts = [[n, *([7, 9] * (MAX_LEN // 2 - 8))] for n in range(3, 7)]
    made = await asyncio.gather(*(engine.generate(prompt, SHORT, str(prompt[0])) for prompt in prompts))
    assert [worst(each, first.model, SHORT, prompt) < 1e-4 for each, prompt in zip(made, prompts, strict=True)] == [
        True
    ] * 4


async def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside(engine: VllmEngine) -> None:
    seeded, free = SHORT.model_copy(update={"max_tokens": 40}), LONG.model_copy(update={"seed": None})
    alone = await engine.generate(PROMPT, seeded, "a")
    async with slowed(engine):
        beside = [asyncio.create_task(engine.generate(prompt, free, "beside")) for prompt in ([5], [6, 7])]
        await busy(engine, running=2)
        again = asyncio.create_task(engine.generate(PROMPT, seeded, "b"))
        await busy(engine, running=3)
    assert (await again).token_ids == alone.token_ids
    await engine.abort("beside")
    await asyncio.gather(*beside)


async def test_generation_ends_at_the_models_length(engine: VllmEngine) -> None:
    full = await engine.generate([5] * (MAX_LEN - 3), LONG, "a")
    assert (full.finish_reason, len(full.token_ids)) == ("length", 3)
