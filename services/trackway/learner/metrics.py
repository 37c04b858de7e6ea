"""Metrics of a batch under the names that verl's dashboards use (verl/trainer/ppo/metric_utils.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trackway.learner.algorithm import by_token
from trackway.learner.batch import TrainingBatch
from trackway.learner.measuring import Metrics, spread
from trackway.wire.trajectory import StopReason, Trajectory

VARIANCE_EPS = 1e-5
"""Added to the variance of the returns that the explained variance is a share of."""


def batch_metrics(used: Sequence[Trajectory], batch: TrainingBatch, rewards: Tensor, returns: Tensor) -> Metrics:
    """Scores, advantages, turns and counts of the trajectories trained on, and lengths of their rows, in `batch`.

    `rewards` [B] are the scores less the KL penalty. `returns` are by row, [N] or [N, T - 1]. Advantages and returns
    weigh each trajectory by its trained tokens, as in verl. `response_length/clip_ratio` is the share that stopped
    because the response was full.
    """
    full = [t.stop_reason is StopReason.MAX_RESPONSE for t in used]
    rows, mask = [row for t in used for row in t.rows], batch.response_mask
    return {
        **spread("critic/score", scores_of(used)),
        **spread("critic/rewards", rewards.tolist()),
        **spread("critic/advantages", by_token(batch.advantages).expand_as(mask)[mask].tolist()),
        **spread("critic/returns", by_token(returns).expand_as(mask)[mask].tolist()),
        **spread("response_length", [len(row.response_ids) for row in rows]),
        "response_length/clip_ratio": sum(full) / len(used),
        **spread("prompt_length", [len(row.prompt_ids) for row in rows]),
        **spread("num_turns", [t.num_turns for t in used]),
        "perf/total_num_tokens": float(batch.lengths.sum()),
        "training/trained_tokens": float(batch.response_mask.sum()),
        "training/trajectories": float(len(used)),
    }


def value_metrics(batch: TrainingBatch) -> Metrics:
    """The values of the trained tokens before the update, and the share of their returns' variance that they explain.

    Empty for a batch without values. The share is 1 - var(returns - values) / (var(returns) + 1e-5), as in verl.
    """
    if batch.values is None or batch.returns is None:
        return {}
    values, returns = (given[batch.response_mask].double() for given in (batch.values, batch.returns))
    metrics = spread("critic/values", values.tolist())
    if len(values) > 1:
        metrics["critic/vf_explained_var"] = 1 - float((returns - values).var() / (returns.var() + VARIANCE_EPS))
    return metrics


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    """The mean of each metric of the rows, which have the same ones. Empty without rows."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}


def drift_metrics(logp: Tensor, rollout_logp: Tensor) -> Metrics:
    """Return how far the trainer's logprobs are from the sampler's, over N model tokens under equal weights.

    In float32 the largest |dlogp| is below 1e-4. Above 1 the mask, the ids or the temperature are wrong.
    """
    probs, rollout_probs = logp.exp(), rollout_logp.exp()
    diff = (probs - rollout_probs).abs()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(diff.max()),
        "training/rollout_probs_diff_mean": float(diff.mean()),
        "training/rollout_probs_diff_std": float(diff.std()) if len(diff) > 1 else 0.0,
        "training/rollout_logprob_diff_max": float((logp - rollout_logp).abs().max()),
        "training/rollout_actor_probs_pearson_corr": _correlation(probs, rollout_probs),
    }


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return 1.0 if scale == 0.0 else float((a * b).sum()) / scale


def scores_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """The score of each trajectory. Raises ValueError for a trajectory that was not scored."""
    scores = [trajectory.reward.score for trajectory in trajectories if trajectory.reward is not None]
    if len(scores) != len(trajectories):
        unscored = next(trajectory.id for trajectory in trajectories if trajectory.reward is None)
        raise ValueError(f"expected a reward, got none in {unscored}; drop it with filter_trajectories()")
    return scores
