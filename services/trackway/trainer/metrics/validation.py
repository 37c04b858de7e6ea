"""Validation metrics under verl's names (`process_validation_metrics` in verl/trainer/ppo/metric_utils.py).

`val-core/<data_source>/` has the metrics for comparing runs, `val-aux/<data_source>/` the others. With n > 1 rollouts
per row, `best@k` and `worst@k` are the exact expectations of the best and worst of k draws with replacement; verl
estimates them from 1,000 draws. `pass@k` draws without replacement, as evaluations do.

How often n rollouts of a task solve it: exact formulas for k of them, and averages over tasks with their errors.

Rollouts are drawn without replacement. verl's `best@k`, which draws with replacement, is in `validation`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from trackway.learner.measuring import Metrics, spread
from trackway.trainer.metrics.rollout import MOST_COMPONENTS, score, tool_metrics
from trackway.wire.trajectory import Trajectory

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


CORE = "acc"
"""The variable in `val-core`. The reward is repeated there because dashboards of older releases expect it."""


def validation_metrics(trajectories: Sequence[Trajectory], n: int) -> Metrics:
    """Metrics of each data source over the successful trajectories; `val-aux/tools/*` covers all trajectories.

    `acc` is `accuracy`. Other components keep their own names, the first 512 by name for each data source.
    """
    successful = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics: Metrics = {}
    for source in dict.fromkeys(trajectory.data_source for trajectory in successful):
        members = [trajectory for trajectory in successful if trajectory.data_source == source]
        for variable, groups in _variables(members).items():
            for name, value in _group_metrics(groups, n).items():
                core = variable == CORE and name.startswith(("mean@", f"best@{n}/"))
                metrics[f"val-{'core' if core else 'aux'}/{source}/{variable}/{name}"] = value
        metrics[f"val-core/{source}/reward/mean@{n}"] = metrics[f"val-aux/{source}/reward/mean@{n}"]
        metrics |= {f"val-aux/{source}/{CORE}/pass@{k}": rate for k, rate in _pass_rates(members, n).items()}
    metrics |= spread("val-aux/num_turns", [trajectory.num_turns for trajectory in successful])
    metrics["val-aux/failed_trajectories"] = float(len(trajectories) - len(successful))
    return metrics | tool_metrics(trajectories, "val-aux/tools")


def accuracy(trajectory: Trajectory) -> float:
    """The reward component `acc`, or the score without the penalty on long responses."""
    components = {} if trajectory.reward is None else trajectory.reward.components
    return components.get(CORE, components.get("score", score(trajectory)))


def _pass_rates(members: Sequence[Trajectory], n: int) -> dict[int, float]:
    """pass@k over the rows that have k rollouts; one passes with a score over 0."""
    scores: dict[int | str, list[float]] = defaultdict(list)
    for trajectory in members:
        scores[trajectory.tags.sample_index].append(accuracy(trajectory))
    counts = [(len(group), sum(value > 0 for value in group)) for group in scores.values()]
    rates = {k: [pass_at(size, passed, k) for size, passed in counts if size >= k] for k in draws(n)[1:]}
    return {k: _mean(values) for k, values in rates.items() if values}


def _variables(members: Sequence[Trajectory]) -> Mapping[str, list[list[float]]]:
    """Variable -> its values, one list per row. Components with a `/` in their name are left to `tool_metrics`."""
    values: dict[str, dict[int | str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in members:
        all_components = {} if trajectory.reward is None else trajectory.reward.components
        components = {name: value for name, value in all_components.items() if "/" not in name}
        for name, value in {CORE: accuracy(trajectory), **components, "reward": score(trajectory)}.items():
            values[name][trajectory.tags.sample_index].append(value)
    own = sorted(values.keys() - {CORE, "reward"})[:MOST_COMPONENTS]
    return {name: list(values[name].values()) for name in (CORE, *own, "reward")}


def _group_metrics(groups: Sequence[Sequence[float]], n: int) -> Metrics:
    """The mean over all values; standard deviation, best and worst of k averaged over the rows."""
    flat = [value for group in groups for value in group]
    metrics = {f"mean@{n}": sum(flat) / len(flat)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = _mean([_std(group) for group in groups])
    for k in draws(n)[1:]:
        for name, sign in (("best", 1.0), ("worst", -1.0)):
            moments = [best_of(k, [sign * value for value in group]) for group in groups]
            metrics[f"{name}@{k}/mean"] = sign * _mean([mean for mean, _ in moments])
            metrics[f"{name}@{k}/std"] = _mean([std for _, std in moments])
    return metrics


def best_of(k: int, values: Sequence[float]) -> tuple[float, float]:
    """verl's best@k: mean and standard deviation of the largest of k draws with replacement."""
    size = len(values)
    weights = [(rank / size) ** k - ((rank - 1) / size) ** k for rank in range(1, size + 1)]
    ordered = sorted(values)
    mean = sum(weight * value for weight, value in zip(weights, ordered, strict=True))
    square = sum(weight * _squared(value - mean) for weight, value in zip(weights, ordered, strict=True))
    return mean, math.sqrt(square)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([_squared(value - mean) for value in values]))


def _squared(value: float) -> float:
    return value * value  # returns infinity where ** raises OverflowError


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
