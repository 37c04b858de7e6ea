"""Policy losses by the name of `actor.policy_loss.loss_mode`.

A new one is a function here marked `@policy_loss`, and its name in `config.policy.LOSSES`. A user's own is named
`module:function`. Formulas, clamps and aggregations are verl's (verl/trainer/ppo/core_algos.py, release 0.9.1). Each
loss is a sum over tokens or sequences divided by the totals of the mini-batch, so that it does not depend on
micro-batches.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from trackway.learner.algorithm import LOG_RATIO_BOUND, Aggregation, aggregate, ppo_loss, reinforce_loss
from trackway.learner.config import LearnerConfig
from trackway.serving.user_code import own_function

SEQUENCE_LOG_RATIO_BOUND = 10.0
"""GSPO's log ratio is clamped from above."""
SMALLEST_PROBABILITY = 1e-8
"""Added to the probabilities of all other tokens in the KL of `dppo_kl`."""
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
    """[B, T]: factor of each token's loss, or None for 1."""
    selected: Tensor | None = None
    """[B, T] bool: the tokens that the loss treats apart, or that `gspo` takes the ratio of. None otherwise."""

    @property
    def log_ratio(self) -> Tensor:
        """[B, T]: logp - old_logp, clamped to +-20."""
        return (self.logp - self.old_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def total(self, losses: Tensor, mode: str = "") -> Tensor:
        """The loss of token losses [B, T]. Aggregated as `mode` says, or as configured."""
        weighted = losses if self.weights is None else losses * self.weights
        return aggregate(weighted, self.mask, self.agg._replace(mode=mode) if mode else self.agg)

    def token_mean(self, values: Tensor) -> Tensor:
        """The mean of values [B, T] over the tokens of the mini-batch, without a gradient."""
        return (values.detach() * self.mask).sum() / self.agg.tokens

    def over_tokens(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, 1]: the mean of values [B, T] or [B, 1] over the tokens of each sequence, or of `mask`."""
        mask = self.mask if mask is None else mask
        return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


PolicyLoss: TypeAlias = Callable[[LearnerConfig, LossInputs], LossAndStats]
"""Returns a loss that adds up over micro-batches, and statistics without a gradient, which become `actor/<name>`."""

POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Losses by name."""


def policy_loss(function: PolicyLoss) -> PolicyLoss:
    """Register a loss under the function's name."""
    POLICY_LOSSES[function.__name__] = function
    return function


@policy_loss
def vanilla(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """PPO's clipped loss with the dual clip."""
    logp, old_logp, advantages, mask, agg, weights, _ = inputs
    low, high = config.clip_range
    loss, stats = ppo_loss(logp, old_logp, advantages, mask, low, high, config.actor.clip_ratio_c, agg, weights)
    return loss, stats._asdict()


@policy_loss
def gspo(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Group sequence policy optimization (arXiv:2507.18071), in the paper with seq-mean-token-mean.

    The ratio is s = exp(mean log r) of the sequence, with the gradient of each token's own logprob. It is clipped as in
    PPO, usually at a few 1e-4.
    """
    low, high = config.clip_range
    gain = -inputs.advantages
    log_ratio = inputs.logp - inputs.old_logp
    log_s = inputs.logp - inputs.logp.detach() + inputs.over_tokens(log_ratio, inputs.selected).detach()
    ratio = log_s.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
    plain, clipped = gain * ratio, gain * ratio.clamp(1 - low, 1 + high)
    loss = inputs.total(torch.maximum(plain, clipped))
    return loss, {
        "pg_clipfrac": inputs.token_mean((clipped > plain).to(gain.dtype)),
        "ppo_kl": inputs.token_mean(-log_ratio),
    }


@policy_loss
def sapo(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Soft adaptive policy optimization (arXiv:2511.20347), as seq-mean-token-mean.

    -A (4 / tau) sigmoid(tau (r - 1)), tau = `tau_pos` for A > 0, else `tau_neg`.
    """
    advantages, log_ratio = inputs.advantages, inputs.log_ratio
    tau_pos, tau_neg = (advantages.new_tensor(tau) for tau in (config.actor.tau_pos, config.actor.tau_neg))
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    losses = -advantages * (4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return inputs.total(losses, "seq-mean-token-mean"), {"ppo_kl": inputs.token_mean(-log_ratio)}


@policy_loss
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


@policy_loss
def gpg(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Group policy gradient (AMAP-ML/GPG): -A log p, without a ratio."""
    log_ratio = inputs.logp - inputs.old_logp
    losses = -inputs.advantages * inputs.logp
    return inputs.total(losses), {"ppo_kl": inputs.token_mean(-log_ratio)}


@policy_loss
def dro(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Direct reward optimization: -(A log p - `dro_beta` (log r)^2 / 2)."""
    log_ratio = inputs.logp - inputs.old_logp
    penalty = 0.5 * (config.actor.policy_loss.dro_beta or 0.0) * log_ratio.square()
    losses = penalty - inputs.advantages * inputs.logp
    return inputs.total(losses), {"ppo_kl": inputs.token_mean(-log_ratio)}


@policy_loss
def geo_mean(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Geometric-mean policy optimization (arXiv:2507.20673): the mean over sequences of -A exp(mean clipped log r).

    Log ratios are clipped to [-low, high] on the side where clipping lowers the objective, and count as 0 for a token
    without an advantage, as in verl. `loss_agg_mode` has no effect. Importance weights enter as their geometric mean
    over the sequence, advantages of tokens as their mean.
    """
    low, high = config.clip_range
    advantages, log_ratio = inputs.advantages, inputs.logp - inputs.old_logp
    clamped, sign = log_ratio.clamp(-low, high), advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * clamped)
    losses = -inputs.over_tokens(advantages) * inputs.over_tokens(bounded).exp()
    if inputs.weights is not None:
        losses = losses * inputs.over_tokens((inputs.weights + SMALLEST_WEIGHT).log()).exp()
    clipped = (log_ratio != clamped).to(log_ratio.dtype)
    share = inputs.mask.sum(1) / inputs.agg.lengths(inputs.mask)  # of a row in its trajectory; 1 where it is whole
    return (losses.squeeze(1) * share).sum() / inputs.agg.sequences, {
        "pg_clipfrac": inputs.token_mean(clipped * (advantages > 0)),
        "pg_clipfrac_lower": inputs.token_mean(clipped * (advantages < 0)),
        "ppo_kl": inputs.token_mean(-log_ratio),
    }


@policy_loss
def dppo_tv(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Divergence PPO by total variation (arXiv:2602.04879): -A min(r, clip_ratio_c) log p; r has no gradient.

    Zero where the probability has moved by more than the clip range in the direction of the advantage.
    """
    low, high = config.clip_range
    change = inputs.logp.detach().exp() - inputs.old_logp.exp()
    return _divergence_ppo(config, inputs, torch.where(inputs.advantages > 0, change <= high, change >= -low))


@policy_loss
def dppo_kl(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Divergence PPO by the KL of the token against all others (arXiv:2602.04879); as `dppo_tv` otherwise."""
    low, high = config.clip_range
    logp = inputs.logp.detach()
    prob, old_prob = logp.exp(), inputs.old_logp.exp()
    others = ((1 - old_prob + SMALLEST_PROBABILITY) / (1 - prob + SMALLEST_PROBABILITY)).log()
    kl = old_prob * (inputs.old_logp - logp) + (1 - old_prob) * others
    above, below = (kl <= high) | (prob <= old_prob), (kl <= low) | (prob >= old_prob)
    return _divergence_ppo(config, inputs, torch.where(inputs.advantages > 0, above, below))


def _divergence_ppo(config: LearnerConfig, inputs: LossInputs, trusted: Tensor) -> LossAndStats:
    """The loss of the tokens that are `trusted` [B, T]."""
    log_ratio, bound = inputs.log_ratio.detach(), config.actor.clip_ratio_c
    ratio = log_ratio.exp()
    losses = -inputs.advantages * ratio.clamp(max=bound) * inputs.logp * trusted
    return inputs.total(losses), {
        "pg_clipfrac": inputs.token_mean((~trusted).to(ratio.dtype)),
        "pg_clipfrac_lower": inputs.token_mean(((ratio > bound) & trusted).to(ratio.dtype)),
        "ppo_kl": inputs.token_mean(-log_ratio),
    }


@policy_loss
def clip_cov(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss without the tokens that `select_clip_cov` chose."""
    low, high = config.clip_range
    ratio, left_out = inputs.log_ratio.exp(), _selected(inputs)
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(1 - low, 1 + high))
    return inputs.total(losses.masked_fill(left_out, 0.0)), {
        "pg_clipfrac": inputs.token_mean(left_out.to(ratio.dtype)),
        "ppo_kl": inputs.token_mean(-inputs.log_ratio),
    }


@policy_loss
def kl_cov(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """KL-Cov (arXiv:2505.22617): -A r, plus `ppo_kl_coef` |log r| of the tokens that `select_kl_cov` chose.

    `ppo_kl` is the mean of |log r| here.
    """
    log_ratio = inputs.log_ratio
    penalty = config.actor.policy_loss.ppo_kl_coef * log_ratio.abs() * _selected(inputs)
    return inputs.total(-inputs.advantages * log_ratio.exp() + penalty), {"ppo_kl": inputs.token_mean(log_ratio.abs())}


@policy_loss
def bypass_mode(config: LearnerConfig, inputs: LossInputs) -> LossAndStats:
    """The loss of `rollout_correction.bypass_mode` against the sampler's logprobs: `vanilla`, or REINFORCE."""
    if config.algorithm.rollout_correction.loss_type == "ppo_clip":
        return vanilla(config, inputs)
    logp, old_logp, advantages, mask, agg, weights, _ = inputs
    loss, ppo_kl = reinforce_loss(logp, old_logp, advantages, mask, agg, weights)
    return loss, {"ppo_kl": ppo_kl}


def select_clip_cov(config: LearnerConfig, inputs: LossInputs, draw: torch.Generator) -> Tensor:
    """[B, T] bool: a random share of the unclipped tokens of a mini-batch whose covariance is within the bounds."""
    settings, (low, high) = config.actor.policy_loss, config.clip_range
    gain, ratio, covariance = -inputs.advantages, inputs.log_ratio.exp(), _covariance(inputs)
    clipped = gain * ratio.clamp(1 - low, 1 + high) > gain * ratio
    eligible = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub) & inputs.mask & ~clipped
    places = eligible.nonzero()
    wanted = max(1, int(settings.clip_cov_ratio * int(inputs.mask.sum())))
    chosen = places[torch.randperm(len(places), generator=draw)[:wanted]]
    selected = torch.zeros_like(inputs.mask)
    rows, columns = chosen.T
    selected[rows, columns] = True
    return selected


def select_kl_cov(config: LearnerConfig, inputs: LossInputs, draw: torch.Generator) -> Tensor:
    """[B, T] bool: the share of the tokens of a mini-batch that have the highest covariance."""
    covariance = _covariance(inputs)[inputs.mask]
    wanted = max(1, int(config.actor.policy_loss.kl_cov_ratio * len(covariance)))
    among_tokens = torch.zeros(len(covariance), dtype=torch.bool)
    among_tokens[covariance.topk(wanted).indices] = True
    return torch.zeros_like(inputs.mask).masked_scatter(inputs.mask, among_tokens)


def _covariance(inputs: LossInputs) -> Tensor:
    """[B, T]: the advantage less its mean over tokens, times the logprob less its mean."""
    advantages = inputs.advantages.expand(inputs.mask.shape)
    return (advantages - advantages[inputs.mask].mean()) * (inputs.logp - inputs.logp[inputs.mask].mean())


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise ValueError("expected the tokens that the loss treats apart, got none; select them in the mini-batch")
    return inputs.selected


SELECTIONS: dict[str, Callable[[LearnerConfig, LossInputs, torch.Generator], Tensor]] = {
    "clip_cov": select_clip_cov,
    "kl_cov": select_kl_cov,
}
"""Choice of tokens in a mini-batch by loss, from its logprobs under the current weights."""


def policy_loss_of(name: str) -> PolicyLoss:
    """The loss of a name. Raises ValueError when an own one, `module:function`, cannot be loaded."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    return cast(PolicyLoss, own_function("actor_rollout_ref.actor.policy_loss.loss_mode", name))
