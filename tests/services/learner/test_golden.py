"""Advantages, aggregation and the clipped loss against exact fractions and closed forms, in float64.

Each expectation is derived here in a form other than the code's own: fractions instead of floats, and cases by the
sides of the clip range instead of minima and maxima.
"""

import math
import random
from collections import defaultdict
from fractions import Fraction

import pytest
import torch

from trackway.learner.algorithm import AGGREGATIONS, Aggregation, aggregate, grpo_advantages, ppo_loss

F64 = torch.float64
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def close(actual: torch.Tensor, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=F64), rtol=0, atol=atol)


def expected_advantages(scores: list[Fraction], groups: list[str], norm_by_std: bool) -> list[float]:
    members: dict[str, list[Fraction]] = defaultdict(list)
    for score, group in zip(scores, groups, strict=True):
        members[group].append(score)
    result = []
    for score, group in zip(scores, groups, strict=True):
        own = members[group]
        if len(own) == 1:
            result.append(float(score) / (1.000001 if norm_by_std else 1.0))
            continue
        mean = sum(own, Fraction(0)) / len(own)
        variance = sum(((member - mean) ** 2 for member in own), Fraction(0)) / (len(own) - 1)
        result.append(float(score - mean) / (math.sqrt(variance) + 1e-6 if norm_by_std else 1.0))
    return result


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_advantages_of_interleaved_groups_of_every_size(norm_by_std: bool):
    draw = random.Random(0)
    groups = ["one"] + ["two"] * 2 + ["three"] * 3 + ["sixteen"] * 16 + ["equal"] * 4
    draw.shuffle(groups)
    scores = [Fraction(3, 10) if name == "equal" else Fraction(draw.randrange(-20, 20), 8) for name in groups]

    actual = grpo_advantages(torch.tensor([float(score) for score in scores], dtype=F64), groups, norm_by_std)

    close(actual, expected_advantages(scores, groups, norm_by_std))
    assert [float(a) for a, name in zip(actual, groups, strict=True) if name == "equal"] == [0.0] * 4


MASK = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
"""8 tokens in 3 sequences of 3, 1 and 4; two rows have none."""
SCALE = 16
WEIGHTS = {
    "token-mean": [Fraction(1, 8)] * 3,
    "token-sum": [Fraction(1)] * 3,
    "seq-mean-token-sum": [Fraction(1, 3)] * 3,
    "seq-mean-token-sum-norm": [Fraction(1, 48)] * 3,
    "seq-mean-token-mean": [Fraction(1, 9), Fraction(1, 3), Fraction(1, 12)],
}
"""What one token of each of the three sequences weighs in the result."""


def of_row(mode: str, row: int) -> Fraction:
    return WEIGHTS[mode][(0, 2, 3).index(row)] if any(MASK[row]) else Fraction(0)


def weights(mode: str) -> list[list[float]]:
    return [[float(of_row(mode, row) * bit) for bit in line] for row, line in enumerate(MASK)]


def test_every_aggregation_mode_has_a_golden_weight():
    assert WEIGHTS.keys() == AGGREGATIONS.keys()


@pytest.mark.parametrize("mode", WEIGHTS)
def test_each_tokens_weight_in_the_aggregate(mode: str):
    values = torch.zeros(5, 4, dtype=F64, requires_grad=True)
    mask = torch.tensor(MASK).bool()

    aggregate(values, mask, Aggregation.over(mask, mode, SCALE)).backward()

    assert values.grad is not None
    close(values.grad, weights(mode), atol=1e-15)


@pytest.mark.parametrize("mode", WEIGHTS)
@pytest.mark.parametrize("cut", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_the_aggregate_is_the_sum_over_any_micro_batches(mode: str, cut: list[int]):
    draw = random.Random(1)
    numbers = [[Fraction(draw.randrange(-99, 99), 7) for _ in line] for line in MASK]
    pairs = [(of_row(mode, row), zip(numbers[row], MASK[row], strict=True)) for row in range(5)]
    expected = sum((weight * value * bit for weight, line in pairs for value, bit in line), Fraction(0))
    values, mask = torch.tensor([[float(n) for n in line] for line in numbers], dtype=F64), torch.tensor(MASK).bool()
    order = torch.tensor([3, 1, 0, 4, 2])
    agg = Aggregation.over(mask, mode, SCALE)

    parts = [aggregate(values[rows], mask[rows], agg) for rows in order.split(cut)]

    close(torch.stack(parts).sum(), float(expected))


def token_loss(advantage: float, log_ratio: float) -> tuple[float, float]:
    """The clipped loss of one token and its derivative by the logprob, side by side of the clip range."""
    bounded = max(-20.0, min(20.0, log_ratio))
    ratio, moves = math.exp(bounded), -20.0 <= log_ratio <= 20.0
    if advantage >= 0:
        free, bound = ratio <= 1 + HIGH, 1 + HIGH
    else:
        free, bound = 1 - LOW <= ratio <= DUAL, DUAL if ratio > DUAL else 1 - LOW
    return (-advantage * ratio, -advantage * ratio * moves) if free else (-advantage * bound, 0.0)


LOG_RATIOS = [-25.0, -3.0, -0.3, -0.2, 0.0, 0.2, 0.26, 0.5, 1.0, 1.2, 5.0, 25.0]
"""Both sides of log 0.8 = -0.223, log 1.28 = 0.247, log 3 = 1.099 and +-20."""


@pytest.mark.parametrize("mode", WEIGHTS)
@pytest.mark.parametrize("advantage", [2.0, 0.5, 0.0, -0.5, -2.0])
def test_policy_loss_and_its_gradient_on_each_side_of_each_bound(mode: str, advantage: float):
    old = torch.tensor([[-1.5] * len(LOG_RATIOS)], dtype=F64)
    logp = (old + torch.tensor([LOG_RATIOS], dtype=F64)).requires_grad_()
    mask = torch.ones(1, len(LOG_RATIOS), dtype=torch.bool)
    agg = Aggregation.over(mask, mode, SCALE)
    expected = [token_loss(advantage, log_ratio) for log_ratio in LOG_RATIOS]
    share = {"token-mean": 1 / 12, "seq-mean-token-mean": 1 / 12, "seq-mean-token-sum-norm": 1 / 16}.get(mode, 1.0)

    loss, stats = ppo_loss(logp, old, torch.tensor([advantage], dtype=F64), mask, LOW, HIGH, DUAL, agg)
    loss.backward()

    assert logp.grad is not None
    # A ratio of e^20 makes losses of up to 1e9, so the tolerance is relative.
    torch.testing.assert_close(loss.item(), share * math.fsum(loss for loss, _ in expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        logp.grad, torch.tensor([[share * slope for _, slope in expected]], dtype=F64), rtol=1e-12, atol=1e-12
    )
    beyond = {
        1: sum(log_ratio > 0.247 for log_ratio in LOG_RATIOS),
        0: 0,
        -1: sum(log_ratio < -0.223 for log_ratio in LOG_RATIOS),
    }
    sign = (advantage > 0) - (advantage < 0)
    assert float(stats.pg_clipfrac) == pytest.approx(beyond[sign] / 12)
    assert float(stats.pg_clipfrac_lower) == pytest.approx((sum(o > 1.099 for o in LOG_RATIOS) if sign < 0 else 0) / 12)
    assert float(stats.ppo_kl) == pytest.approx(-sum(max(-20, min(20, log_ratio)) for log_ratio in LOG_RATIOS) / 12)


def test_masked_tokens_and_fully_masked_rows_have_no_loss_and_no_gradient():
    draw = random.Random(2)
    ratios = [[draw.uniform(-1.5, 1.5) for _ in line] for line in MASK]
    advantages, mask = [1.5, -7.0, -0.5, 0.25, 9.0], torch.tensor(MASK).bool()
    logp = torch.tensor(ratios, dtype=F64, requires_grad=True)
    agg = Aggregation.over(mask, "seq-mean-token-sum-norm", SCALE)
    tokens = [[token_loss(a, log_ratio) for log_ratio in line] for a, line in zip(advantages, ratios, strict=True)]
    weight = weights("seq-mean-token-sum-norm")

    zeros = torch.zeros(5, 4, dtype=F64)
    loss, _ = ppo_loss(logp, zeros, torch.tensor(advantages, dtype=F64), mask, LOW, HIGH, DUAL, agg)
    loss.backward()

    assert logp.grad is not None
    close(loss, sum(weight[r][c] * tokens[r][c][0] for r in range(5) for c in range(4)))
    close(logp.grad, [[weight[r][c] * tokens[r][c][1] for c in range(4)] for r in range(5)])
