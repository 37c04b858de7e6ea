"""The mathematics against numbers worked out by hand."""

import math

import pytest
import torch

from trackway.learner.algorithm import (
    AGGREGATIONS,
    Aggregation,
    aggregate,
    entropy_from_logits,
    exact_kl,
    grpo_advantages,
    kl_penalty,
    ppo_loss,
    reinforce_loss,
)

F64 = torch.float64
ONE_TOKEN = Aggregation("token-mean", tokens=1.0, sequences=1.0)


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-12)


def test_advantages_are_scores_minus_group_mean_over_unbiased_std():
    advantages = grpo_advantages(tensor(1, 0, 2), ["a", "a", "a"])

    close(advantages, [0.0, -0.999999000001, 0.999999000001])


def test_advantages_of_interleaved_groups_are_taken_within_each_group():
    scores = tensor(1, 0, 1, 0, 1, 0, 0, 1)

    advantages = grpo_advantages(scores, ["easy", "hard"] * 3 + ["easy", "hard"])

    # easy has 1 1 1 0: mean 0.75, std 0.5; hard has 0 0 0 1: mean 0.25, std 0.5. Over the batch all would be +-0.94.
    high, low = 0.499999000002, 1.499997000006
    close(advantages, [high, -high, high, -high, high, -high, -low, low])


def test_advantages_without_std_are_scores_minus_group_mean():
    advantages = grpo_advantages(tensor(1, 0, 5, 2), ["a", "a", "b", "b"], norm_by_std=False)

    close(advantages, [0.5, -0.5, 1.5, -1.5])


def test_a_group_of_one_has_mean_0_and_std_1():
    close(grpo_advantages(tensor(5, 7), ["a", "b"]), [5 / 1.000001, 7 / 1.000001])
    close(grpo_advantages(tensor(5, 7), ["a", "b"], norm_by_std=False), [5.0, 7.0])


def test_equal_scores_have_no_advantage_even_when_their_mean_rounds():
    scores = torch.full((3,), 0.1, dtype=torch.float32)

    assert grpo_advantages(scores, ["a", "a", "a"]).tolist() == [0.0, 0.0, 0.0]


def test_advantages_without_a_group_for_each_score_are_refused():
    with pytest.raises(ValueError, match=r"expected one score per group key, \[1\], got \[2\]"):
        grpo_advantages(tensor(1, 2), ["a"])


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped", "lower"),
    [
        (1.0, 1.0, -1.0, 0.0, 0.0),
        (0.5, 1.0, -0.5, 0.0, 0.0),
        (1.0, 1.5, -1.28, 1.0, 0.0),
        (1.0, 0.5, -0.5, 0.0, 0.0),
        (-1.0, 0.5, 0.8, 1.0, 0.0),
        (-1.0, 2.0, 2.0, 0.0, 0.0),
        (-1.0, 4.0, 3.0, 0.0, 1.0),
        (-2.0, 4.0, 6.0, 0.0, 1.0),
        (2.0, 4.0, -2.56, 1.0, 0.0),
        (0.0, 4.0, 0.0, 0.0, 0.0),
    ],
)
def test_policy_loss_of_one_token(advantage: float, ratio: float, loss: float, clipped: float, lower: float):
    logp, mask = tensor([math.log(ratio)]), torch.ones(1, 1, dtype=torch.bool)

    actual, stats = ppo_loss(logp, tensor([0.0]), tensor(advantage), mask, 0.2, 0.28, 3.0, ONE_TOKEN)

    close(actual, loss)
    assert (float(stats.pg_clipfrac), float(stats.pg_clipfrac_lower)) == (clipped, lower)
    close(stats.ppo_kl, -math.log(ratio))


def test_a_ratio_is_taken_to_the_old_logprob():
    mask = torch.ones(1, 1, dtype=torch.bool)

    loss, stats = ppo_loss(tensor([-1.0]), tensor([-1.1]), tensor(1.0), mask, 0.2, 0.2, 3.0, ONE_TOKEN)

    close(loss, -math.exp(0.1))
    close(stats.ppo_kl, -0.1)


def test_a_loss_that_only_reaches_the_dual_clip_is_not_counted_as_clipped():
    mask = torch.ones(1, 1, dtype=torch.bool)

    _, stats = ppo_loss(tensor([0.0]), tensor([0.0]), tensor(-1.0), mask, 0.2, 0.2, 1.0, ONE_TOKEN)

    assert float(stats.pg_clipfrac_lower) == 0.0


def test_log_ratio_is_clamped_to_20():
    mask = torch.ones(1, 1, dtype=torch.bool)

    loss, stats = ppo_loss(tensor([100.0]), tensor([0.0]), tensor(-1.0), mask, 0.2, 0.2, 1e12, ONE_TOKEN)

    assert float(loss) == pytest.approx(485165195.40979028, rel=1e-12)
    assert float(stats.ppo_kl) == -20.0


def test_policy_loss_and_stats_ignore_masked_tokens():
    logp = tensor([math.log(1.5), 9.0], [math.log(4.0), math.log(2.0)])
    mask = torch.tensor([[True, False], [True, True]])
    agg = Aggregation("token-mean", tokens=3.0, sequences=2.0)

    loss, stats = ppo_loss(logp, torch.zeros(2, 2, dtype=F64), tensor(1.0, -1.0), mask, 0.2, 0.2, 3.0, agg)

    close(loss, (-1.2 + 3.0 + 2.0) / 3)
    assert float(stats.pg_clipfrac) == pytest.approx(1 / 3)
    assert float(stats.pg_clipfrac_lower) == pytest.approx(1 / 3)
    assert float(stats.ppo_kl) == pytest.approx(-2.4849066497880004 / 3)


@pytest.mark.parametrize(
    ("kind", "penalties"),
    [
        ("kl", [0.5, -0.5, 30.0, -30.0]),
        ("k1", [0.5, -0.5, 30.0, -30.0]),
        ("abs", [0.5, 0.5, 30.0, 30.0]),
        ("mse", [0.125, 0.125, 450.0, 450.0]),
        ("k2", [0.125, 0.125, 450.0, 450.0]),
        ("low_var_kl", [0.1065306597126334, 0.1487212707001282, 10.0, 10.0]),
        ("k3", [0.1065306597126334, 0.1487212707001282, 10.0, 10.0]),
    ],
)
def test_kl_penalty_of_log_ratios_to_the_reference(kind: str, penalties: list[float]):
    close(kl_penalty(tensor(0.5, -0.5, 30.0, -30.0), tensor(0.0, 0.0, 0.0, 0.0), kind), penalties)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("kl+", 0.5), ("abs+", 0.5), ("k2+", 0.125), ("low_var_kl+", 0.1065306597126334), ("k3+", 0.1065306597126334)],
)
def test_a_kl_kind_with_a_plus_has_its_own_value_and_the_gradient_of_k2(kind: str, value: float):
    logp = tensor(-1.0).requires_grad_()

    penalty = kl_penalty(logp, tensor(-1.5), kind)
    penalty.sum().backward()

    close(penalty.detach(), [value])
    assert logp.grad is not None
    close(logp.grad, [0.5])


def test_the_kl_of_a_token_compares_it_with_the_reference_and_not_with_zero():
    close(kl_penalty(tensor(-1.0, -1.0), tensor(-1.5, -3.0), "k1"), [0.5, 2.0])


def test_the_exact_kl_is_taken_over_the_last_dimension():
    even, odd = tensor(0.0, 0.0), tensor(0.0, math.log(3.0))
    logits, ref_logits = torch.stack([even, odd, odd])[None], torch.stack([odd, even, odd])[None]

    # 1/2 ln(1/2 : 1/4) + 1/2 ln(1/2 : 3/4), and 1/4 ln(1/4 : 1/2) + 3/4 ln(3/4 : 1/2)
    close(exact_kl(logits, ref_logits), [[0.5 * math.log(4 / 3), 0.25 * math.log(27 / 16), 0.0]])


def test_unknown_kl_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"kl_loss_type .* to be one of kl, k1, .*low_var_kl, k3, kl\+, .*, got 'k9'"):
        kl_penalty(tensor(0.0), tensor(0.0), "k9")


VALUES = tensor([1, 2, 3], [4, 5, 6], [7, 8, 9])
MASK = torch.tensor([[True, True, False], [False, False, True], [False, False, False]])
SCALE = 10.0
AGGREGATED = {
    "token-mean": 3.0,
    "token-sum": 9.0,
    "seq-mean-token-sum": 4.5,
    "seq-mean-token-sum-norm": 0.45,
    "seq-mean-token-mean": 3.75,
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_over_masked_tokens(mode: str):
    close(aggregate(VALUES, MASK, Aggregation.over(MASK, mode, SCALE)), AGGREGATED[mode])


OF_SESSIONS = {
    "token-mean": 4.0,
    "token-sum": 16.0,
    "seq-mean-token-sum": 8.0,
    "seq-mean-token-sum-norm": 0.8,
    "seq-mean-token-mean": (10 / 3 + 6) / 2,
}
"""The first and the third row, with the values 1, 2 and 7, are one trajectory; the second, with 6, is another."""


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_rows_of_a_trajectory_are_one_sequence(mode: str):
    mask, owners = torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.bool), torch.tensor([0, 1, 0])
    agg = Aggregation.over(mask, mode, SCALE, owners)
    first, last = torch.tensor([0]), torch.tensor([1, 2])

    close(aggregate(VALUES, mask, agg), OF_SESSIONS[mode])
    parts = [aggregate(VALUES[rows], mask[rows], agg.of_rows(rows)) for rows in (first, last)]
    close(torch.stack(parts).sum(), OF_SESSIONS[mode])


def test_a_trajectory_whose_tokens_are_all_rejected_is_no_sequence():
    mask, owners = torch.tensor([[1, 0], [0, 0], [0, 0], [1, 1]], dtype=torch.bool), torch.tensor([0, 1, 2, 2])

    assert Aggregation.over(mask, "seq-mean-token-sum", SCALE, owners).sequences == 2.0


def test_without_a_scale_the_norm_divides_by_one():
    mode = "seq-mean-token-sum-norm"

    close(aggregate(VALUES, MASK, Aggregation.over(MASK, mode)), 4.5)
    close(aggregate(VALUES, MASK, Aggregation(mode, tokens=3.0, sequences=2.0)), 4.5)


def test_unknown_aggregation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"loss_agg_mode to be one of token-mean, token-sum, .*, got 'mean'"):
        aggregate(VALUES, MASK, Aggregation.over(MASK, "mean"))


def test_entropy_in_nats():
    logits = tensor([0.0, math.log(3.0)], [2.0, 2.0], [1000.0, 0.0])

    close(entropy_from_logits(logits[None]), [[0.5623351446188083, 0.6931471805599453, 0.0]])


def test_weights_are_factors_of_the_token_losses():
    ratio, weights = tensor([2.0, 0.5, 1.0]).log(), tensor([0.5, 4.0, 3.0])
    mask, zeros = torch.tensor([[True, True, False]]), tensor([0.0] * 3)
    agg = Aggregation.over(mask, "token-sum")

    weighted, stats = ppo_loss(ratio, zeros, tensor([1.0, -1.0, 1.0]), mask, 0.2, 0.25, 3.0, agg, weights)

    # -1.25 of the clipped ratio 2, and 0.8 of the ratio 1/2, which the loss takes for 1 - 0.2.
    close(weighted, 0.5 * -1.25 + 4 * 0.8)
    assert float(stats.pg_clipfrac) == 1.0


def test_reinforce_is_the_weighted_logprob_times_the_advantage():
    logp, old_logp = tensor([-1.0, -0.5, -9.0], [-2.0, -9.0, -9.0]), tensor([-1.5, -0.25, 9.0], [-1.0, 9.0, 9.0])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    agg, weights = Aggregation.over(mask, "token-mean"), tensor([2.0, 4.0, 9.0], [0.5, 9.0, 9.0])

    plain, kl = reinforce_loss(logp, old_logp, tensor(2.0, -3.0), mask, agg)
    weighted, _ = reinforce_loss(logp, old_logp, tensor(2.0, -3.0), mask, agg, weights)

    close(plain, (2 * (1 + 0.5) - 3 * 2) / 3)
    close(kl, (-0.5 + 0.25 + 1) / 3)
    close(weighted, (2 * (2 * 1 + 4 * 0.5) - 3 * 0.5 * 2) / 3)
