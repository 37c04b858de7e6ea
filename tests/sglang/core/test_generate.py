"""Generation by a real SGLang: ids in and out, logprobs, stops, pieces, bounds."""

import pytest

from tests.sglang.sglang_runs import MARKS
from tests.vllm.vllm_runs import GREEDY, LONG, MAX_LEN, PROMPT, VOCAB, Weights, logprobs_of, worst
from trackway.rollout.engines.remote.sglang import UNUSED_POSITIONS, SglangEngine
from trackway.wire.rollout import SamplingParams

pytestmark = MARKS


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60, ignore_eos=True, seed=1),
        SamplingParams(max_tokens=60, ignore_eos=True, seed=2, temperature=0.7),
        SamplingParams(max_tokens=60, ignore_eos=True, seed=3, temperature=0.7, top_k=20),
        SamplingParams(max_tokens=60, ignore_eos=True, seed=4, temperature=1.3, top_p=0.8),
        GREEDY,
        GREEDY.model_copy(update={"top_k": 3, "top_p": 0.5}),
    ],
    ids=["plain", "cool", "cool-top-k", "hot-top-p", "greedy", "greedy-top-k-top-p"],
)
async def test_logprobs_are_those_of_the_sampling_distribution(
    engine: SglangEngine, first: Weights, params: SamplingParams
) -> None:
    made = await engine.generate(PROMPT, params, "a")
    assert (made.finish_reason, len(made.token_ids)) == ("length", params.max_tokens)
    assert worst(made, first.model, params if params.temperature else GREEDY) < 1e-4
    assert [(span.version, span.start, span.end) for span in made.spans] == [(engine.version, 0, params.max_tokens)]


async def test_the_longest_prompt_and_the_longest_sequence_are_those_that_the_server_takes(
    engine: SglangEngine,
) -> None:
    longest = MAX_LEN - UNUSED_POSITIONS - 1
    last = await engine.generate([5] * longest, LONG, "a")
    full = await engine.generate([5] * (longest - 2), LONG, "b")
    assert [(made.finish_reason, len(made.token_ids)) for made in (last, full)] == [("length", 1), ("length", 3)]


async def test_the_last_token_of_the_vocabulary_is_scored(engine: SglangEngine, first: Weights) -> None:
    tokens = [3, VOCAB - 1, 5, VOCAB - 1]
    assert await engine.score(tokens) == pytest.approx(logprobs_of(first.model, tokens, 1), abs=1e-4)
