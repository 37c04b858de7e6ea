"""The engine against transformers, and against itself: batching, reuse and seeds change no result."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.rollout.rollout_models import FAMILIES, VOCAB, core_of, reference_logprobs, run, sequence
from trackway.rollout.engines.torch.core import EngineCore
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.engines.torch.scheduler import Sequence
from trackway.rollout.engines.torch.weights import load
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams

pytestmark = pytest.mark.slow

Folders = Callable[..., Path]


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(1000 * length + seed)
    return [source.randrange(3, VOCAB) for _ in range(length)]


def ragged(temperature: float = 1.0, count: int = 12) -> list[Sequence]:
    lengths = [1 + (7 * index) % 40 for index in range(count)]
    return [
        sequence(prompt(length), SamplingParams(temperature=temperature, seed=length, max_tokens=4 + length % 9))
        for length in lengths
    ]


def differences(model_path: Path, requests: list[Sequence]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    return [
        abs(ours - theirs)
        for r in requests
        for ours, theirs in zip(
            r.logprobs,
            reference_logprobs(model, r.prompt + r.output, len(r.prompt), r.params.temperature),
            strict=True,
        )
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(folders: Folders, family: str, temperature: float) -> None:
    requests = ragged(temperature)
    run(core_of(folders(family), slots=4), *requests)
    found = differences(folders(family), requests)
    assert len(found) == sum(request.limit for request in requests)
    assert max(found) < 1e-4


def test_greedy_tokens_equal_transformers_generate(folders: Folders) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders("qwen3-tied")).eval()
    request = sequence(prompt(9), SamplingParams(temperature=0, max_tokens=20))
    run(core_of(folders("qwen3-tied")), request)
    theirs = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        torch.tensor([prompt(9)]),
        attention_mask=torch.ones(1, 9),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=None,
    )
    assert request.output == theirs[0, 9:].tolist()


def test_a_request_in_a_ragged_batch_gives_what_it_gives_alone(model_path: Path) -> None:
    together = ragged()
    run(core_of(model_path, slots=5), *together)
    for request in together:
        alone = sequence(request.prompt, request.params)
        run(core_of(model_path), alone)
        assert alone.output == request.output
        assert alone.logprobs == pytest.approx(request.logprobs, abs=1e-4)


def test_requests_join_and_leave_between_steps(model_path: Path) -> None:
    core = core_of(model_path, slots=2)
    lengths = [sequence(prompt(5, n), limit=limit) for n, limit in enumerate((9, 2, 3, 4))]
    run(core, *lengths)
    assert [len(request.output) for request in lengths] == [9, 2, 3, 4]
    assert core.stats().steps == 9  # 2 + 3 + 4 tokens ran in the second slot beside the 9 of the first


def test_the_next_turn_takes_its_slot_over_and_computes_only_what_is_new(model_path: Path) -> None:
    core = core_of(model_path)
    first = sequence(prompt(30))
    run(core, first)
    second = sequence([*first.prompt, *first.output, 5, 6, 7])
    before = core.stats()
    run(core, second)
    assert core.stats().reused_tokens - before.reused_tokens == 30 + 8 - 1  # the last token was never fed
    assert core.stats().prefilled_tokens - before.prefilled_tokens == 4
    assert max(differences(model_path, [second])) < 1e-4


def test_samples_of_one_prompt_compute_it_once(model_path: Path) -> None:
    core = core_of(model_path, slots=8)
    samples = [sequence(prompt(40), SamplingParams(seed=n, max_tokens=6)) for n in range(8)]
    run(core, *samples)
    assert core.stats().prefilled_tokens == 40 + 7
    assert len({tuple(request.output) for request in samples}) == 8
    assert max(differences(model_path, samples)) < 1e-4


def test_reuse_under_pressure_never_changes_a_logprob(model_path: Path) -> None:
    core = core_of(model_path, slots=3)
    source, trunk = random.Random(5), prompt(50)
    prompts = [trunk[: source.randrange(1, 50)] + prompt(source.randrange(1, 12), n) for n in range(40)]
    requests = [sequence(prompt, SamplingParams(seed=n, max_tokens=5)) for n, prompt in enumerate(prompts)]
    run(core, *requests)
    assert core.stats().reused_tokens > 300
    assert max(differences(model_path, requests)) < 1e-4


def test_the_cache_grows_with_the_longest_request(folders: Folders) -> None:
    core = core_of(folders("qwen3-gqa"), slots=2, max_len=600)
    requests = [sequence(prompt(20), limit=40), sequence(prompt(250), limit=40)]
    run(core, *requests)
    assert max(differences(folders("qwen3-gqa"), requests)) < 1e-4


def test_a_request_may_fill_its_slot_to_the_end(model_path: Path) -> None:
    core = core_of(model_path, slots=2, max_len=64)
    first = sequence(prompt(48), limit=1)
    run(core, first)
    almost_full, longer = sequence(prompt(48) + prompt(15), limit=1), sequence(prompt(20, 1), limit=9)
    run(core, almost_full, longer)
    assert core.stats().reused_tokens == 48
    assert max(differences(model_path, [almost_full, longer])) < 1e-4


def test_an_update_in_flight_gives_two_spans_and_keeps_the_cache(model_path: Path, other_path: Path) -> None:
    core, new = core_of(model_path), core_of(other_path).weights
    request = sequence(prompt(12), limit=8)
    core.scheduler.waiting.append(request)
    with torch.inference_mode():
        for _ in range(3):
            core.step()
        core.swap(new, 5)
    run(core)
    assert [(s.version, s.start, s.end) for s in request.spans] == [(0, 0, 3), (5, 3, 8)]
    assert core.stats().prefilled_tokens == 12


def test_after_an_update_nothing_old_is_reused(model_path: Path, other_path: Path) -> None:
    core, new = core_of(model_path), core_of(other_path).weights
    run(core, sequence(prompt(40)))
    core.swap(new, 1)
    request = sequence(prompt(40))
    run(core, request)
    assert core.stats().reused_tokens == 0
    assert max(differences(other_path, [request])) < 1e-4


def test_slots_that_are_no_neighbours_decode_together(model_path: Path) -> None:
    core = core_of(model_path, slots=6)
    limits = (12, 2, 12, 3, 3, 12)
    requests = [sequence(prompt(9 + n, n), limit=limit) for n, limit in enumerate(limits)]
    run(core, *requests)
    assert [len(request.output) for request in requests] == [*limits]
    assert max(differences(model_path, requests)) < 1e-4


def test_prefills_that_exceed_a_forward_are_computed_in_several(model_path: Path) -> None:
    core = core_of(model_path, slots=12)
    core.scheduler._group_tokens = 60
    requests = ragged()
    run(core, *requests)
    assert core.stats().steps == 12  # the longest limit: no request waited for a later step
    assert max(differences(model_path, requests)) < 1e-4


def test_in_bfloat16_logprobs_stay_within_its_rounding(model_path: Path) -> None:
    engine = TorchEngine(RolloutSettings(model_path=model_path, max_model_len=256, device="cpu", dtype="bfloat16"))
    core = EngineCore(engine._decoder, load(engine._decoder, model_path), 0, slots=4)
    requests = ragged()
    run(core, *requests)
    found = differences(model_path, requests)
    assert 0.001 < sum(found) / len(found) < 0.05


def test_scores_equal_transformers(model_path: Path) -> None:
    core, tokens = core_of(model_path), prompt(30)
    with torch.inference_mode():
        scored = core.decoder.score(core.weights, tokens)
    reference = reference_logprobs(AutoModelForCausalLM.from_pretrained(model_path).eval(), tokens, 1, 1.0)
    assert scored == pytest.approx(reference, abs=1e-4)


def test_an_output_that_is_not_finite_fails_the_request_and_leaves_no_trace(model_path: Path) -> None:
    core = core_of(model_path, slots=2)
    good = core.weights
    with torch.inference_mode():
        core.swap(core_of(model_path).weights, 1)
        core.weights.norm.fill_(float("nan"))
        core.weights.layers[0].qkv.fill_(float("nan"))
        core.scheduler.waiting.extend([sequence(prompt(30)), sequence(prompt(31))])
        ended = core.step()
    assert isinstance(ended[0].result, TrackwayError)
    assert "expected a finite logprob, got nan with weights version 1" in ended[0].result.message
    core.swap(good, 2)
    after = [sequence(prompt(5)), sequence(prompt(20))]
    run(core, *after)
    assert max(differences(model_path, after)) < 1e-4


def test_a_step_that_raises_ends_every_request_and_the_next_one_works(model_path: Path) -> None:
    core: EngineCore = core_of(model_path, slots=1)
    core.scheduler.waiting.extend([sequence(prompt(4)), sequence(prompt(4))])
    ended = core.fail(RuntimeError("out of memory"))
    assert len(ended) == 2 and not core.scheduler.busy
    after = sequence(prompt(4))
    run(core, after)
    assert len(after.output) == 8
