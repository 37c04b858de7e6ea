"""Validation metrics under verl's names (`process_validation_metrics` in verl/trainer/ppo/metric_utils.py).

`val-core/<data_source>/` has the metrics for comparing runs, `val-aux/<data_source>/` the others. With n > 1 rollouts
per row, `best@k` and `worst@k` are the exact expectations of the best and worst of k draws with replacement; verl
estimates them from 1,000 draws. `pass@k` draws without replacement, as evaluations do.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from trackway.trainer.metrics.pass_rates import draws, pass_at
from trackway.trainer.metrics.rollout import MOST_COMPONENTS, Metrics, score, spread
from trackway.trainer.metrics.tools import tool_metrics
from trackway.wire.trajectory import Trajectory

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
