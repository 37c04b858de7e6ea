"""The formulas against counts of all choices of k rollouts."""

import itertools
import random
from collections import Counter

import pytest

from trackway.trainer.metrics import Estimate, draws, majority_at, pass_all, pass_at


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_rates_are_shares_of_all_choices(n: int):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = [*itertools.combinations([True] * correct + [False] * (n - correct), k)]

        assert pass_at(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)
        assert pass_all(n, correct, k) == pytest.approx(sum(map(all, choices)) / len(choices), abs=1e-15)


def voted(answers: tuple[str | None, ...]) -> float:
    counts = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer in counts if counts[answer] == max(counts.values())]
    return sum(answer == "right" for answer in winners) / len(winners) if winners else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_a_majority_is_the_mean_over_all_choices(seed: int):
    generator = random.Random(seed)
    answers = [generator.choice(["right", "wrong", "other", "rare", None]) for _ in range(7)]
    for k in range(1, 8):
        choices = [*itertools.combinations(answers, k)]

        found = majority_at(answers, [answer == "right" for answer in answers], k)

        assert found == pytest.approx(sum(map(voted, choices)) / len(choices), abs=1e-12)


def test_a_majority_of_many_rollouts_is_counted_for_all_of_them_only():
    answers = ["right"] * 40 + ["wrong"] * 25
    correct = [answer == "right" for answer in answers]

    assert (majority_at(answers, correct, 65), majority_at(answers, correct, 2)) == (1.0, None)


def test_a_mean_has_the_error_of_its_tasks():
    mean = Estimate.over([0.0, 1.0, 1.0, 0.0])

    assert mean.value == 0.5
    assert mean.std_err == pytest.approx((1 / 3 / 4) ** 0.5)
    assert mean.interval == pytest.approx((0.5 - 1.959964 * (1 / 12) ** 0.5, 0.5 + 1.959964 * (1 / 12) ** 0.5))
    assert Estimate.over([0.25]) == Estimate(value=0.25, std_err=None, interval=None, tasks=1)


def test_draws_double_up_to_n():
    assert (draws(1), draws(4), draws(6)) == ([1], [1, 2, 4], [1, 2, 4, 6])
