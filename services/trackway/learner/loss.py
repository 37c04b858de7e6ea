"""The loss of a micro-batch: the policy loss, less the entropy bonus, plus the KL penalty and the distillation loss."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trackway.learner.algorithm import Aggregation, aggregate, by_token, entropy_from_logits, kl_penalty
from trackway.learner.batch import TrainingBatch
from trackway.learner.config import LearnerConfig
from trackway.learner.distillation import TopkMeasures, distillation_loss, estimate_losses
from trackway.learner.head import Measure, entropy_measure, full_kl, token_logprobs
from trackway.learner.policy_losses import LossInputs, policy_loss_of
from trackway.learner.rollout_correction import correct, loglinear_logprobs

KEPT_SHARE = "kept_share"
"""Share of the tokens of a mini-batch that the policy loss itself does not reject. No metric of the run."""
MEANS_OF_KEPT = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")


class MicroLoss(NamedTuple):
    """A micro-batch's share of its mini-batch."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """Their sums over the micro-batches are for `of_kept_tokens`."""
    logp: Tensor
    """[N]: logprobs of the model tokens, without a gradient."""
    entropies: Tensor
    """[N]: entropies there, in nats, without a gradient."""
    distillation: tuple[Tensor, ...] = ()
    """[N] each: the distillation losses there, then the other measures of topk, without a gradient."""


def measures_of(config: LearnerConfig, entropy: Callable[[Tensor], Tensor] = entropy_from_logits) -> list[Measure]:
    """Measures of the policy's logits for `micro_loss`, in the order of its `values`. `entropy` is [n] of [n, V]."""
    measures = [token_logprobs, entropy_measure(entropy, with_gradient=config.trains_entropy)]
    if config.uses_full_kl:
        measures.append(full_kl)
    if (distillation := config.distillation_loss) is not None and distillation.uses_topk:
        topk = TopkMeasures(distillation)
        measures += [topk.loss, topk.student_mass, topk.overlap, topk.overlap_token_advantage]
    return measures


def micro_loss(
    config: LearnerConfig,
    micro: TrainingBatch,
    values: Sequence[Tensor],
    agg: Aggregation,
    weights_mean: float | None = None,
) -> MicroLoss:
    """The loss from what `measures_of` measured of the policy's tempered logits at the response mask, [N] each.

    `weights_mean` divides importance weights that the loss itself computes, or None for their mean in this micro-batch.
    """
    actor, mask = config.actor, micro.response_mask
    logp, entropies, *further = (at_mask(mask, measured) for measured in values)
    inputs = _loss_inputs(config, micro, logp, agg, weights_mean)
    pg_loss, stats = policy_loss_of(config.loss_mode)(config, inputs)
    entropy_mean = aggregate(entropies, mask, agg)
    loss = pg_loss - actor.entropy_coeff * entropy_mean
    metrics = {f"actor/{name}": value for name, value in stats.items()}
    if inputs.mask is not mask:
        metrics[KEPT_SHARE] = inputs.mask.sum().double() / agg.tokens
    metrics |= {"actor/pg_loss": pg_loss.detach(), "actor/entropy": entropy_mean.detach()}
    if config.trains_entropy:
        metrics["actor/entropy_loss"] = entropy_mean.detach()
    if actor.use_kl_loss:
        full = further.pop(0) if config.uses_full_kl else None
        of_tokens = kl_penalty(logp, micro.ref_logprobs, actor.kl_loss_type) if full is None else full
        kl_loss = aggregate(of_tokens, mask, agg)
        loss = loss + actor.kl_loss_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss.detach()
    distilled: list[Tensor] = []
    if (distillation := config.distillation_loss) is not None:
        distilled = further or [estimate_losses(distillation, logp, _of_teacher(micro))]
        distilled_loss, measured = distillation_loss(distillation, inputs, distilled[0])
        metrics |= measured
        if distillation.use_task_rewards:
            loss = loss + distillation.distillation_loss_coef * distilled_loss
        else:
            loss = distilled_loss
    further = tuple(values.detach()[mask] for values in distilled)
    return MicroLoss(loss, metrics, logp.detach()[mask], entropies.detach()[mask], further)


def _of_teacher(micro: TrainingBatch) -> Tensor:
    """[B, T]. Raises ValueError for a batch that no teacher scored."""
    if micro.teacher_logprobs is None:
        raise ValueError("expected trajectories that a teacher scored, got some without; score them before the update")
    return micro.teacher_logprobs


def _loss_inputs(
    config: LearnerConfig, micro: TrainingBatch, logp: Tensor, agg: Aggregation, weights_mean: float | None
) -> LossInputs:
    """Inputs of the policy loss, whose mask is of the tokens in it; logp: [B, T].

    Without a pass for old logprobs, the ratio to the sampler changes with every optimizer step, so weights and
    rejection are computed here. As in verl, a token rejected here is left out of the policy loss only, and the totals
    that losses are divided by still count it.
    """
    correction = config.algorithm.rollout_correction
    old_logp, weights, mask = micro.old_logprobs, micro.rollout_is_weights, micro.response_mask
    if not config.recompute_old_logprobs:
        with torch.no_grad():
            old_logp = proximal_logprobs(micro, logp)
            now = logp if correction.bypass_mode else old_logp
            weights, mask = correct(correction, now - micro.old_logprobs, mask, weights_mean)
    if not config.uses_weights:
        weights = None
    return LossInputs(logp, old_logp, by_token(micro.advantages), mask, agg, weights, micro.selected)


def of_kept_tokens(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a mini-batch, with verl's statistics of the policy loss as means over the tokens in it.

    Each micro-batch divides by all tokens of the mini-batch, before it is known how many of them are kept.
    """
    metrics = dict(metrics)
    share = metrics.pop(KEPT_SHARE, 1.0) or 1.0  # without a kept token the sums are zero
    return {name: value / share if name in MEANS_OF_KEPT else value for name, value in metrics.items()}


def proximal_logprobs(batch: TrainingBatch, logp: Tensor) -> Tensor:
    """[B, T]: the old logprobs, estimated from the trained policy's [B, T] if the batch has shares for it."""
    if batch.loglinear_share is None:
        return batch.old_logprobs
    return loglinear_logprobs(logp, batch.old_logprobs, batch.loglinear_share)


def clipped_and_kept(config: LearnerConfig, mini: TrainingBatch, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [B, T] each, from the trained policy's logprobs [B, T]: the ratio left the range of `clip_ratio` on the side
    where PPO's loss has no gradient; and the token is in the policy loss.
    """
    old_logp, kept = proximal_logprobs(mini, logp), mini.response_mask
    correction = config.algorithm.rollout_correction
    if not config.recompute_old_logprobs:
        now = logp if correction.bypass_mode else old_logp
        _, kept = correct(correction, now - mini.old_logprobs, kept)
    low, high = config.clip_range
    ratio, advantages = (logp - old_logp).exp(), by_token(mini.advantages)
    is_beyond = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return is_beyond & kept, kept


def at_mask(mask: Tensor, values: Tensor) -> Tensor:
    """[B, T] with the N values where the mask is set, row by row, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
