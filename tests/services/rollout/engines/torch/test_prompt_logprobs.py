"""Scored prompts: transformers' log_softmax at each position, whatever is cached, sampled or runs beside them."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.rollout.engine_runs import PROMPT
from tests.services.rollout.engines.torch.test_core import prompt
from tests.services.rollout.rollout_models import VOCAB, build, core_of, run, sequence
from trackway.rollout.engines.torch.decoder import Row
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.engines.torch.weights import load
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PromptLogprobs, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def scoring(most_likely: int, **params: float) -> SamplingParams:
    return SamplingParams.model_validate({"max_tokens": 3, "seed": 1, "prompt_logprobs": most_likely, **params})


def expect_scores(
    found: PromptLogprobs | None, folder: Path, token_ids: list[int], most_likely: int, within: float = 5e-5
) -> None:
    """Expect transformers' logprobs at temperature 1."""
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([token_ids])).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), -1)
    best = logprobs.topk(most_likely)
    assert found is not None
    expected = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    assert found.logprobs == pytest.approx(expected.tolist(), abs=within)
    assert found.top_ids == best.indices.tolist()
    assert [len(row) for row in found.top_logprobs] == [most_likely] * (len(token_ids) - 1)
    found_values = [value for row in found.top_logprobs for value in row]
    assert found_values == pytest.approx(best.values.flatten().tolist(), abs=within)


@pytest.mark.parametrize("most_likely", [0, 1, 20])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.5, "top_k": 3, "top_p": 0.5}, {"temperature": 0.0}])
async def test_a_scored_prompt_has_the_models_logprobs_at_temperature_1(
    engine: TorchEngine, model_path: Path, most_likely: int, params: dict[str, float]
) -> None:
    asked = scoring(most_likely, **params)
    made = await engine.generate(prompt(30), asked, "a")
    expect_scores(made.prompt_logprobs, model_path, prompt(30), most_likely)
    plain = await engine.generate(prompt(30), asked.model_copy(update={"prompt_logprobs": None}), "b")
    assert plain.prompt_logprobs is None
    assert made.token_ids == plain.token_ids
    assert made.logprobs == pytest.approx(plain.logprobs, rel=1e-5, abs=1e-5)


async def test_a_prompt_longer_than_the_positions_scored_at_once(engine: TorchEngine, model_path: Path) -> None:
    made = await engine.generate(prompt(300), scoring(2), "a")
    expect_scores(made.prompt_logprobs, model_path, prompt(300), 2, within=1e-4)


async def test_a_prompt_of_one_token_has_no_scores(engine: TorchEngine) -> None:
    made = await engine.generate([5], scoring(4), "a")
    assert made.prompt_logprobs == PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
    assert len(made.token_ids) == 3


async def test_a_cached_prompt_is_scored_whole_and_is_reused_afterwards(engine: TorchEngine, model_path: Path) -> None:
    token_ids = prompt(40)
    first = await engine.generate(token_ids[:25], scoring(0).model_copy(update={"prompt_logprobs": None}), "a")
    scored = await engine.generate(token_ids, scoring(3), "b")
    again = await engine.generate(token_ids, scoring(3), "c")
    reusing = await engine.generate([*token_ids, 7], SamplingParams(max_tokens=1), "d")
    assert (first.cached_tokens, scored.cached_tokens, again.cached_tokens, reusing.cached_tokens) == (0, 0, 0, 40)
    expect_scores(scored.prompt_logprobs, model_path, token_ids, 3)
    assert again.prompt_logprobs == scored.prompt_logprobs


async def test_a_stream_has_the_scores_once(engine: TorchEngine, model_path: Path) -> None:
    pieces = [piece async for piece in engine.stream(prompt(12), scoring(2), "a")]
    [scores] = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
    expect_scores(scores, model_path, prompt(12), 2)
    assert pieces[0].prompt_logprobs is scores


def test_prompts_are_scored_beside_other_requests_a_group_of_tokens_in_a_step(model_path: Path) -> None:
    core = core_of(model_path, slots=8)
    core.scheduler._group_tokens = 40
    lengths = [30, 20, 20, 50]
    scored = [sequence(prompt(length), scoring(5)) for length in lengths]
    others = [sequence(prompt(length), SamplingParams(max_tokens=6, seed=length)) for length in (1, 17)]
    alone = [sequence(other.prompt, other.params) for other in others]
    run(core_of(model_path), *alone)
    core.scheduler.waiting.extend([scored[0], others[0], *scored[1:], others[1]])
    begun: list[list[int]] = []
    with torch.inference_mode():
        for _ in range(3):
            core.step()
            begun.append([len(request.prompt) for request in scored if request.prompt_logprobs is not None])
    assert begun == [[30], [30, 20, 20], lengths]
    run(core)
    for request in scored:
        expect_scores(request.prompt_logprobs, model_path, request.prompt, 5)
    assert [other.output for other in others] == [other.output for other in alone]


async def test_new_weights_score_with_their_own_logprobs(engine: TorchEngine, model_path: Path, tmp_path: Path) -> None:
    build(tmp_path, seed=5)
    before = await engine.generate(prompt(20), scoring(1), "a")
    core = engine._started()
    weights = await asyncio.to_thread(load, core.decoder, tmp_path)
    await engine._thread.call(lambda: core.swap(weights, 1))
    after = await engine.generate(prompt(20), scoring(1), "b")
    expect_scores(before.prompt_logprobs, model_path, prompt(20), 1)
    expect_scores(after.prompt_logprobs, tmp_path, prompt(20), 1)


async def test_scores_that_are_not_finite_fail_the_request(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = PromptLogprobs(logprobs=[-1.0, float("nan")], top_ids=[[], []], top_logprobs=[[], []])
    monkeypatch.setattr(engine._decoder, "score_prompt", lambda *_: (torch.zeros(1, VOCAB), scores))
    with pytest.raises(TrackwayError) as raised:
        await engine.generate(PROMPT, scoring(0), "a")
    assert raised.value.code is ErrorCode.ENGINE_FAILED
    assert raised.value.message.startswith("expected a finite logprob, got nan")


def test_more_likely_tokens_than_the_vocabulary_are_all_of_it(model_path: Path) -> None:
    core = core_of(model_path)
    with torch.inference_mode():
        found = core.decoder.score_prompt(core.weights, core.decoder.cache(1), Row(0, 0, prompt(6)), VOCAB + 3)[1]
    expect_scores(found, model_path, prompt(6), VOCAB)
