"""How often n rollouts of a task solve it: exact formulas for k of them, and averages over tasks with their errors.

Rollouts are drawn without replacement. verl's `best@k`, which draws with replacement, is in `validation`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_MOST_VOTES = 64
"""Most rollouts of a task for which the votes of fewer than all are counted."""


class Mean(NamedTuple):
    """An average over tasks."""

    value: float
    error: float | None
    """Standard error. None for one task."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the normal distribution, or None for one task."""
        return None if self.error is None else (self.value - _Z * self.error, self.value + _Z * self.error)


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of one value for each task, and its standard error s / sqrt(tasks) (Miller 2024, arXiv:2411.00640)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Mean(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Mean(mean, math.sqrt(variance / len(values)))


def draws(n: int) -> list[int]:
    """The k that are reported of n rollouts: 1, 2, 4, ... below n, and n."""
    return [*(2**power for power in range(n.bit_length()) if 2**power < n), n]


def pass_at(n: int, correct: int, k: int) -> float:
    """pass@k: the chance that k of n rollouts have a correct one, 1 - C(n-c, k)/C(n, k) (Chen et al. 2021)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def pass_all(n: int, correct: int, k: int) -> float:
    """pass^k: the chance that k of n rollouts are all correct, C(c, k)/C(n, k) (tau-bench, arXiv:2406.12045)."""
    return math.comb(correct, k) / math.comb(n, k)


def majority_at(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float | None:
    """majority@k: the chance that the most frequent answer of k rollouts is correct; a tie is shared.

    A rollout without an answer does not vote. None where k of more than 64 rollouts would have to be counted.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right and answer is not None}
    if k == len(answers):
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most]
        return sum(answer in right for answer in winners) / len(winners) if winners else 0.0
    if len(answers) > _MOST_VOTES:
        return None
    silent = len(answers) - counts.total()
    won = Fraction(0)
    for answer in right & counts.keys():
        others = Counter(counts.values())
        others[counts[answer]] -= 1
        won += _shares_won(counts[answer], tuple(sorted(others.elements())), silent, k)
    return float(won / math.comb(len(answers), k))


@lru_cache(maxsize=1024)
def _shares_won(own: int, others: tuple[int, ...], silent: int, k: int) -> Fraction:
    """Choices of k rollouts that an answer given `own` times wins, each divided by the number of winners."""
    won = Fraction(0)
    for votes in range(1, min(own, k) + 1):
        ways = {(k - votes - unheard, 1): math.comb(silent, unheard) for unheard in range(min(silent, k - votes) + 1)}
        for given in others:
            after = Counter[tuple[int, int]]()
            for (left, winners), number in ways.items():
                for chosen in range(min(given, left, votes) + 1):
                    after[left - chosen, winners + (chosen == votes)] += number * math.comb(given, chosen)
            ways = after
        shares = sum((Fraction(number, winners) for (left, winners), number in ways.items() if left == 0), Fraction(0))
        won += math.comb(own, votes) * shares
    return won
