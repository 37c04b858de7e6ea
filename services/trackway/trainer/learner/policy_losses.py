"""Policy losses by the name of `actor.policy_loss.loss_mode`; a new one is a function and a line of POLICY_LOSSES.

Formulas, clamps and aggregations are verl's (verl/trainer/ppo/core_algos.py). Each loss is a sum over tokens or
sequences divided by the totals of the mini-batch, so that it does not depend on micro-batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trackway.trainer.learner.algorithm import LOG_RATIO_BOUND, Aggregation, aggregate, policy_loss
from trackway.trainer.learner.config import LearnerConfig

SEQUENCE_LOG_RATIO_BOUND = 10.0
"""GSPO's log ratio is clamped from above."""
SMALLEST_WEIGHT = 1e-10
"""Added to importance weights before their geometric mean."""

LossAndStats = tuple[Tensor, dict[str, Tensor]]


class LossInputs(NamedTuple):
    """A micro-batch of B trajectories by T predicted tokens."""

    logp: Tensor
    """[B, T], with a gradient."""
    old_logp: Tensor
    """[B, T]."""
    advantages: Tensor
    """[B, 1], or [B, T] where tokens have their own."""
    mask: Tensor
    """[B, T] bool: the tokens to train on."""
    agg: Aggregation
    weights: Tensor | None
    """[B, T]: factor of each token's loss; None for 1."""

    @property
    def log_ratio(self) -> Tensor:
        """[B, T]: logp - old_logp, clamped to +-20."""
        return (self.logp - self.old_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def total(self, losses: Tensor, mode: str = "") -> Tensor:
        """The loss of token losses [B, T]; aggregated as `mode` says, or as configured."""
        weighted = losses if self.weights is None else losses * self.weights
        return aggregate(weighted, self.mask, self.agg._replace(mode=mode) if mode else self.agg)

    def token_mean(self, values: Tensor) -> Tensor:
        """The mean of values [B, T] over the tokens of the mini-batch, without a gradient."""
        return (values.detach() * self.mask).sum() / self.agg.tokens

    def over_tokens(self, values: Tensor) -> Tensor:
        """[B, 1]: the mean of values [B, T] over the tokens of each sequence."""
        return (values * self.mask).sum(-1, keepdim=True) / self.mask.sum(-1, keepdim=True).clamp(min=1)


def vanilla(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """PPO's clipped loss with the dual clip."""
    logp, old_logp, advantages, mask, agg, weights = inputs
    low, high = config.clip_range
    loss, stats = policy_loss(logp, old_logp, advantages, mask, low, high, config.actor.clip_ratio_c, agg, weights)
    return loss, stats._asdict()


def gspo(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Group sequence policy optimization (arXiv:2507.18071), as seq-mean-token-mean.

    The ratio is s = exp(mean log r) of the sequence, with the gradient of each token's own logprob; it is clipped as in
    PPO, usually at a few 1e-4.
    """
    low, high = config.clip_range
    gain = -inputs.advantages
    log_ratio = inputs.logp - inputs.old_logp
    log_s = inputs.logp - inputs.logp.detach() + inputs.over_tokens(log_ratio).detach()
    ratio = log_s.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
    plain, clipped = gain * ratio, gain * ratio.clamp(1 - low, 1 + high)
    loss = inputs.total(torch.maximum(plain, clipped), "seq-mean-token-mean")
    return loss, {
        "pg_clipfrac": inputs.token_mean((clipped > plain).to(gain.dtype)),
        "ppo_kl": inputs.token_mean(-log_ratio),
    }


def sapo(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Soft adaptive policy optimization (arXiv:2511.20347), as seq-mean-token-mean.

    -A (4 / tau) sigmoid(tau (r - 1)), tau = `tau_pos` for A > 0, else `tau_neg`.
    """
    advantages, log_ratio = inputs.advantages, inputs.log_ratio
    tau_pos, tau_neg = (advantages.new_tensor(tau) for tau in (config.actor.tau_pos, config.actor.tau_neg))
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    losses = -advantages * (4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return inputs.total(losses, "seq-mean-token-mean"), {"ppo_kl": inputs.token_mean(-log_ratio)}


def cispo(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Clipped importance sampling (arXiv:2506.13585): -A log p times the clipped ratio, which has no gradient."""
    low, high = config.clip_range
    log_ratio = inputs.log_ratio.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return inputs.total(-clipped * inputs.advantages * inputs.logp), {
        "pg_clipfrac": inputs.token_mean((ratio != clipped).to(ratio.dtype)),
        "ppo_kl": inputs.token_mean(-log_ratio),
    }


def gpg(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Group policy gradient (AMAP-ML/GPG): -A log p, without a ratio."""
    log_ratio = inputs.logp - inputs.old_logp
    losses = -inputs.advantages * inputs.logp
    return inputs.total(losses), {"ppo_kl": inputs.token_mean(-log_ratio)}


def dro(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Direct reward optimization: -(A log p - `dro_beta` (log r)^2 / 2)."""
    log_ratio = inputs.logp - inputs.old_logp
    penalty = 0.5 * (config.actor.policy_loss.dro_beta or 0.0) * log_ratio.square()
    losses = penalty - inputs.advantages * inputs.logp
    return inputs.total(losses), {"ppo_kl": inputs.token_mean(-log_ratio)}


def geo_mean(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Geometric-mean policy optimization (arXiv:2507.20673): the mean over sequences of -A exp(mean clipped log r).

    Log ratios are clipped to [-low, high] on the side where clipping lowers the objective; `loss_agg_mode` has no
    effect. Importance weights enter as their geometric mean over the sequence, advantages of tokens as their mean.
    """
    low, high = config.clip_range
    advantages, log_ratio = inputs.advantages, inputs.logp - inputs.old_logp
    clamped = log_ratio.clamp(-low, high)
    bounded = torch.where(advantages > 0, torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped))
    advantage = advantages if advantages.shape[1] == 1 else inputs.over_tokens(advantages)
    losses = -advantage * inputs.over_tokens(bounded).exp()
    if inputs.weights is not None:
        losses = losses * inputs.over_tokens((inputs.weights + SMALLEST_WEIGHT).log()).exp()
    clipped = (log_ratio != clamped).to(log_ratio.dtype)
    return (losses * inputs.mask.any(-1, keepdim=True)).sum() / inputs.agg.sequences, {
        "pg_clipfrac": inputs.token_mean(clipped * (advantages > 0)),
        "pg_clipfrac_lower": inputs.token_mean(clipped * (advantages < 0)),
        "ppo_kl": inputs.token_mean(-log_ratio),
    }


POLICY_LOSSES: dict[str, Callable[[LearnerConfig, LossInputs], LossAndStats]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "gpg": gpg,
    "dro": dro,
    "geo_mean": geo_mean,
}
