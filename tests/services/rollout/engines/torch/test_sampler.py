"""Exact values of the sampler on distributions that can be worked out by hand."""

import math
from itertools import islice

import pytest
import torch

from trackway.rollout.engines.torch.sampler import sample, uniforms
from trackway.wire.rollout import SamplingParams

PROBS = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor([PROBS]).log()


def draw(uniform: float, params: SamplingParams) -> tuple[int, float]:
    sampled = sample(LOGITS, [params], [uniform])
    return sampled.token_ids[0], math.exp(sampled.logprobs[0])


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.96, 3), (1 - 2**-24, 3)]
)
def test_a_uniform_number_inverts_the_cumulative_distribution(uniform: float, token: int) -> None:
    assert draw(uniform, SamplingParams()) == (token, pytest.approx(PROBS[token], rel=1e-5))


def test_the_logprob_is_that_of_the_distribution_after_temperature() -> None:
    weights = [p**2 for p in PROBS]  # temperature 0.5 squares the odds
    assert draw(0.8, SamplingParams(temperature=0.5)) == (1, pytest.approx(weights[1] / sum(weights), rel=1e-5))


def test_temperature_zero_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    assert draw(0.99, SamplingParams(temperature=0, top_k=1)) == (0, pytest.approx(0.5, rel=1e-5))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    assert draw(0.99, SamplingParams(temperature=temperature)) == (0, 1.0)
    assert draw(0.99, SamplingParams(temperature=temperature, top_p=0.5, top_k=2)) == (0, 1.0)


def test_top_k_keeps_the_likeliest_and_renormalises() -> None:
    assert draw(0.99, SamplingParams(top_k=2)) == (1, pytest.approx(0.3 / 0.8, rel=1e-5))


def test_top_p_keeps_the_fewest_that_reach_it_and_renormalises() -> None:
    assert draw(0.99, SamplingParams(top_p=0.81)) == (2, pytest.approx(0.15 / 0.95, rel=1e-5))
    assert draw(0.99, SamplingParams(top_p=0.1)) == (0, pytest.approx(1.0))


def test_top_p_applies_to_what_top_k_left() -> None:
    # After top_k=2 the rest is (0.625, 0.375), and the first alone reaches 0.6.
    assert draw(0.99, SamplingParams(top_k=2, top_p=0.6)) == (0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("params", "uniform", "likely"),
    [
        (SamplingParams(logprobs=2), 0.0, {0: 0.5, 1: 0.3}),
        (SamplingParams(logprobs=2), 0.96, {0: 0.5, 3: 0.05}),  # the sampled token is always there
        (SamplingParams(logprobs=1), 0.96, {3: 0.05}),
        (SamplingParams(logprobs=20), 0.6, dict(enumerate(PROBS))),
        (SamplingParams(logprobs=20, top_k=2), 0.99, {0: 0.625, 1: 0.375}),
        (SamplingParams(logprobs=2, temperature=0), 0.99, {0: 0.5, 1: 0.3}),
    ],
)
def test_the_likeliest_tokens_are_those_of_the_sampling_distribution_and_the_sampled_one(
    params: SamplingParams, uniform: float, likely: dict[int, float]
) -> None:
    rows = [SamplingParams(), params]
    sampled = sample(LOGITS.repeat(2, 1), rows, [0.0, uniform])
    plain = sample(LOGITS.repeat(2, 1), [SamplingParams(), params.model_copy(update={"logprobs": 0})], [0.0, uniform])

    assert sampled[:2] == plain[:2] and sampled.top_logprobs[0] == []
    found = [(token, math.exp(logprob)) for token, logprob in sampled.top_logprobs[1]]
    assert [token for token, _ in found] == [*likely]
    assert [probability for _, probability in found] == pytest.approx([*likely.values()], rel=1e-5)


def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    rows = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=0.5)]
    together = sample(LOGITS.repeat(4, 1), rows, [0.96, 0.96, 0.96, 0.8])
    alone = [sample(LOGITS, [row], [uniform]) for row, uniform in zip(rows, [0.96, 0.96, 0.96, 0.8], strict=True)]
    assert together.token_ids == [row.token_ids[0] for row in alone] == [3, 0, 0, 1]
    assert together.logprobs == pytest.approx([row.logprobs[0] for row in alone], abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    drawn = {sample(logits, [SamplingParams()], [u]).token_ids[0] for u in (0.0, 0.4999, 0.5, 1 - 2**-24)}
    assert drawn == {1, 3}


def test_top_p_cuts_off_a_token_when_those_before_it_reach_it_exactly() -> None:
    logits = torch.zeros(1, 2)  # a half each

    assert sample(logits, [SamplingParams(top_p=0.5)], [0.99]) == ([0], [0.0], [[]])


def test_a_top_k_of_0_keeps_all_beside_a_top_p() -> None:
    assert draw(0.99, SamplingParams(top_k=0, top_p=0.81)) == (2, pytest.approx(0.15 / 0.95, rel=1e-5))


def test_of_equally_likely_tokens_the_first_are_kept() -> None:
    sampled = sample(torch.zeros(1, 100), [SamplingParams(top_k=10)], [0.99])

    assert (sampled.token_ids, sampled.logprobs) == ([9], pytest.approx([math.log(0.1)], rel=1e-6))


def test_a_temperature_of_2_takes_the_root_of_the_odds() -> None:
    weights = [math.sqrt(p) for p in PROBS]

    assert draw(0.5, SamplingParams(temperature=2)) == (1, pytest.approx(weights[1] / sum(weights), rel=1e-5))


def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary_without_a_logprob() -> None:
    sampled = sample(torch.full((1, 4), math.nan), [SamplingParams()], [0.5])

    assert sampled.token_ids == [3]
    assert math.isnan(sampled.logprobs[0])


def test_a_seeds_numbers_are_those_of_torchs_generator_however_large_the_seed() -> None:
    expected = torch.rand(150, generator=torch.Generator().manual_seed(7)).tolist()

    assert [list(islice(uniforms(seed), 150)) for seed in (7, 7 + 2**63, 7 + 2**70)] == [expected] * 3
    assert list(islice(uniforms(-1), 2)) == list(islice(uniforms(2**63 - 1), 2))


def test_a_seed_gives_the_same_numbers_each_time_and_none_gives_others() -> None:
    first, again, unseeded, unseeded_again = (list(islice(uniforms(seed), 200)) for seed in (7, 7, None, None))
    assert first == again
    assert unseeded != unseeded_again
    assert all(0 <= number < 1 for number in first)
    assert sum(first) / 200 == pytest.approx(0.5, abs=0.1)
