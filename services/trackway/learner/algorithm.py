"""Policy optimization as pure functions of tensors: group advantages, clipped policy loss, KL, entropy, aggregation.

Formulas and names are verl's (verl/trainer/ppo/core_algos.py). Shapes are B trajectories by T predicted tokens.
Every sum over tokens is divided by totals of the whole mini-batch (`Aggregation`), so adding up micro-batches gives
exactly the loss, the gradient and the statistics of the mini-batch computed at once.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trackway.run_config.algorithm import KlControlConfig

LOG_RATIO_BOUND = 20.0
"""A log ratio is clamped to +-20 before the exponential, so that no ratio overflows float32."""
LOW_VAR_KL_BOUND = 10.0
"""The k3 estimate of one token is clamped to +-10."""


def grpo_advantages(scores: Tensor, groups: Sequence[str], norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantage of each trajectory within its group: (score - mean) / (std + eps), std unbiased.

    scores: [B]; groups: B keys; returns [B]. A group of one trajectory has mean 0 and std 1. A group whose
    scores are all equal gets exactly 0. Without `norm_by_std` only the mean is subtracted (Dr. GRPO).
    Raises ValueError when the lengths differ.
    """
    if scores.shape != (len(groups),):
        raise ValueError(
            f"expected one score per group key, [{len(groups)}], got {list(scores.shape)}; give both per trajectory"
        )
    advantages = torch.empty_like(scores)
    for rows in members_of(groups):
        advantages[rows] = _group_advantages(scores[rows], norm_by_std, eps)
    return advantages


def members_of(groups: Sequence[str]) -> list[list[int]]:
    """The rows of each group."""
    members: dict[str, list[int]] = {}
    for row, key in enumerate(groups):
        members.setdefault(key, []).append(row)
    return list(members.values())


def _group_advantages(scores: Tensor, norm_by_std: bool, eps: float) -> Tensor:
    if len(scores) == 1:
        return scores / (1 + eps) if norm_by_std else scores
    # Rounding of the mean, divided by eps, would otherwise give equal scores an advantage of up to 0.01 in float32.
    if scores.min() == scores.max():
        return torch.zeros_like(scores)
    centred = scores - scores.mean()
    return centred / (scores.std() + eps) if norm_by_std else centred


def by_token(advantages: Tensor) -> Tensor:
    """Advantages [B, 1] or [B, T], which broadcast over tokens, of advantages [B] or [B, T]."""
    return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages


class Aggregation(NamedTuple):
    """How token values are reduced to one number, and the totals of the mini-batch that they are divided by."""

    mode: str
    tokens: float
    """Model tokens in the mini-batch."""
    sequences: float
    """Trajectories of the mini-batch that have a model token."""
    scale: float = 1.0
    """The fixed length by which seq-mean-token-sum-norm divides every trajectory's sum."""
    trajectory_tokens: Tensor | None = None
    """[B]: model tokens of each row's trajectory, or None where each row is a whole trajectory."""

    @classmethod
    def over(cls, mask: Tensor, mode: str, scale: float = 1.0, owners: Tensor | None = None) -> "Aggregation":
        """The totals of a mini-batch whose mask is [B, T]; `owners` [B] numbers the trajectories of its rows.

        The rows of a trajectory are one sequence, however many calls of an agent they come from.
        """
        tokens = mask.sum(-1)
        if owners is None:
            return cls(mode, float(mask.sum()), float((tokens > 0).sum()), scale)
        by_trajectory = torch.zeros(int(owners.max()) + 1, dtype=tokens.dtype).index_add(0, owners, tokens)
        return cls(mode, float(mask.sum()), float((by_trajectory > 0).sum()), scale, by_trajectory[owners])

    def of_rows(self, rows: Tensor) -> "Aggregation":
        """For a micro-batch of these rows [b]."""
        return self if self.trajectory_tokens is None else self._replace(trajectory_tokens=self.trajectory_tokens[rows])

    def lengths(self, mask: Tensor) -> Tensor:
        """[B]: model tokens of the trajectories of the rows whose mask is [B, T]; at least 1."""
        tokens = mask.sum(-1) if self.trajectory_tokens is None else self.trajectory_tokens.to(mask.device)
        return tokens.clamp(min=1)


def _token_mean(values: Tensor, mask: Tensor, totals: Aggregation) -> Tensor:
    return (values * mask).sum() / totals.tokens


def _token_sum(values: Tensor, mask: Tensor, totals: Aggregation) -> Tensor:
    return (values * mask).sum()


def _seq_mean_token_sum(values: Tensor, mask: Tensor, totals: Aggregation) -> Tensor:
    return (values * mask).sum() / totals.sequences


def _seq_mean_token_sum_norm(values: Tensor, mask: Tensor, totals: Aggregation) -> Tensor:
    return _seq_mean_token_sum(values, mask, totals) / totals.scale


def _seq_mean_token_mean(values: Tensor, mask: Tensor, totals: Aggregation) -> Tensor:
    return ((values * mask).sum(-1) / totals.lengths(mask)).sum() / totals.sequences


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Aggregation], Tensor]] = {
    "token-mean": _token_mean,
    "token-sum": _token_sum,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "seq-mean-token-mean": _seq_mean_token_mean,
}


def aggregate(values: Tensor, mask: Tensor, agg: Aggregation) -> Tensor:
    """One number from token values [B, T] under a mask [B, T]. A fully masked row does not count.

    `agg` holds the totals of the mini-batch: the results of its micro-batches add up to the result of the whole.
    Raises ValueError on an unknown mode.
    """
    check_known("loss_agg_mode", agg.mode, AGGREGATIONS)
    return AGGREGATIONS[agg.mode](values, mask.to(values.dtype), agg)


class PolicyStats(NamedTuple):
    """Means over the model tokens of the mini-batch. The stats of its micro-batches add up."""

    pg_clipfrac: Tensor
    """Share of tokens whose clipped loss exceeds the unclipped one."""
    pg_clipfrac_lower: Tensor
    """Share of tokens with a negative advantage that the dual clip bounds."""
    ppo_kl: Tensor
    """Mean of old_logp - logp (k1)."""


def ppo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    agg: Aggregation,
    weights: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """PPO's clipped loss with the dual clip (arXiv:1912.09729) for negative advantages.

    logp, old_logp, mask: [B, T]; advantages: [B] or [B, T]; weights: [B, T], factors of the token losses.
    r = exp(clamp(logp - old_logp)). The token loss is max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)), and where
    A < 0 at most -A clip_c.
    """
    log_ratio = (logp - old_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    gain = -by_token(advantages)
    plain = gain * ratio
    clipped = gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = torch.maximum(plain, clipped)
    bound = gain * clip_c
    losses = torch.where(gain > 0, torch.minimum(upper, bound), upper)
    if weights is not None:
        losses = losses * weights
    with torch.no_grad():
        stats = PolicyStats(
            pg_clipfrac=_share(clipped > plain, mask, agg),
            pg_clipfrac_lower=_share((upper > bound) & (gain > 0), mask, agg),
            ppo_kl=_token_mean(-log_ratio, mask, agg),
        )
    return aggregate(losses, mask, agg), stats


def reinforce_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, agg: Aggregation, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE: the aggregate of -w A logp, and the mean of old_logp - logp (k1).

    logp, old_logp, mask: [B, T]; advantages: [B] or [B, T]; weights: [B, T] without a gradient, None for 1.
    """
    losses = -by_token(advantages) * logp
    if weights is not None:
        losses = losses * weights
    return aggregate(losses, mask, agg), _token_mean((old_logp - logp).detach(), mask, agg)


def _share(hits: Tensor, mask: Tensor, totals: Aggregation) -> Tensor:
    return (hits & mask.bool()).sum() / totals.tokens


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    reverse = (-log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (reverse.exp() - reverse - 1).clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)


KL_PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
"""Estimators of KL(policy, reference) by name. Http://joschu.net/blog/kl-approx.html names k1, k2, k3."""
STRAIGHT_THROUGH = "+"
EXACT_KL = "full"
KL_KINDS = (*KL_PENALTIES, *(kind + STRAIGHT_THROUGH for kind in KL_PENALTIES), EXACT_KL)


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """The KL estimate of each token, in the shape of `logp`.

    Only k2's expected gradient equals the KL's. A kind with `+` has its own value and k2's gradient. Raises
    ValueError on an unknown kind, and on `full`, which takes logits (`exact_kl`).
    """
    check_known("kl_loss_type of sampled tokens", kind, KL_KINDS[:-1])
    log_ratio = logp - ref_logp
    value = KL_PENALTIES[kind.removesuffix(STRAIGHT_THROUGH)](log_ratio)
    if not kind.endswith(STRAIGHT_THROUGH):
        return value
    k2 = _k2(log_ratio)
    return k2 - k2.detach() + value.detach()


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(softmax(logits), softmax(ref_logits)) over the whole vocabulary: [..., V] -> [...]."""
    logp, ref_logp = torch.log_softmax(logits, dim=-1), torch.log_softmax(ref_logits, dim=-1)
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): [..., V] -> [...]."""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).sum(-1)


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError naming the known names when `name` is not among them."""
    if name not in known:
        raise ValueError(f"expected {what} to be one of {', '.join(known)}, got {name!r}; correct the setting")


MOST_RELATIVE_ERROR = 0.2
"""Bound on the error of the KL, as a share of its target, that one step corrects."""


def mean_kl(kl: Tensor, mask: Tensor) -> float:
    """The mean over trajectories of the mean over tokens. Kl, mask: [B, T], each row of the mask has a token."""
    return float(((kl * mask).sum(-1) / mask.sum(-1)).mean())


def next_coefficient(config: KlControlConfig, coefficient: float, kl: float, trajectories: int) -> float:
    """The coefficient after a step of so many trajectories, whose mean KL was `kl` (arXiv:1909.08593, section 2.2)."""
    if config.type == "fixed":
        return coefficient
    error = max(-MOST_RELATIVE_ERROR, min(MOST_RELATIVE_ERROR, kl / config.target_kl - 1))
    return coefficient * (1 + error * trajectories / config.horizon)
