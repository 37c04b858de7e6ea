"""The loss of a micro-batch: the clipped policy loss, less the entropy bonus, plus the KL penalty."""

from typing import NamedTuple

import torch
from torch import Tensor

from trackway.trainer.learner.algorithm import (
    EXACT_KL,
    Aggregation,
    aggregate,
    by_token,
    entropy_from_logits,
    exact_kl,
    kl_penalty,
)
from trackway.trainer.learner.batch import TrainingBatch
from trackway.trainer.learner.config import LearnerConfig
from trackway.trainer.learner.policy_losses import LossInputs, policy_loss_of
from trackway.trainer.learner.rollout_correction import correct, loglinear_logprobs


class MicroLoss(NamedTuple):
    """A micro-batch's share of its mini-batch."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logp: Tensor
    """[N]: logprobs of the model tokens, without a gradient."""


def micro_loss(
    config: LearnerConfig,
    micro: TrainingBatch,
    logits: Tensor,
    ref_logits: Tensor | None,
    agg: Aggregation,
    weights_mean: float | None = None,
) -> MicroLoss:
    """The loss from the policy's tempered logits [N, V] at the response mask; the full KL needs `ref_logits` [N, V].

    `weights_mean` divides importance weights that the loss itself computes; None for their mean in this micro-batch.
    """
    actor, mask = config.actor, micro.response_mask
    logp = at_mask(mask, token_logprobs(logits, micro))
    pg_loss, stats = _policy_loss(config, micro, logp, agg, weights_mean)
    with torch.set_grad_enabled(actor.entropy_coeff != 0.0):
        entropy = aggregate(at_mask(mask, entropy_from_logits(logits)), mask, agg)
    loss = pg_loss - actor.entropy_coeff * entropy
    metrics = {f"actor/{name}": value for name, value in stats.items()}
    metrics |= {"actor/pg_loss": pg_loss.detach(), "actor/entropy": entropy.detach()}
    if actor.entropy_coeff != 0.0:
        metrics["actor/entropy_loss"] = entropy.detach()
    if actor.use_kl_loss:
        kl_loss = aggregate(_kl(actor.kl_loss_type, micro, logp, logits, ref_logits), mask, agg)
        loss = loss + actor.kl_loss_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss.detach()
    return MicroLoss(loss, metrics, logp.detach()[mask])


def _policy_loss(
    config: LearnerConfig, micro: TrainingBatch, logp: Tensor, agg: Aggregation, weights_mean: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss and its statistics; logp: [B, T].

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
    inputs = LossInputs(logp, old_logp, by_token(micro.advantages), mask, agg, weights, micro.selected)
    return policy_loss_of(config.loss_mode)(config, inputs)


def proximal_logprobs(batch: TrainingBatch, logp: Tensor) -> Tensor:
    """[B, T]: the old logprobs, estimated from those of the trained policy [B, T] if the batch has shares for it."""
    if batch.loglinear_share is None:
        return batch.old_logprobs
    return loglinear_logprobs(logp, batch.old_logprobs, batch.loglinear_share)


def token_logprobs(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """[N]: logprobs of the predicted tokens under the response mask, from the logits [N, V] there."""
    targets = batch.input_ids[:, 1:][batch.response_mask]
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def sum_pi_squared(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """[N]: the sum over the vocabulary of squared probabilities, from logits [N, V]."""
    return (2 * torch.log_softmax(logits, dim=-1)).exp().sum(-1)


def at_mask(mask: Tensor, values: Tensor) -> Tensor:
    """[B, T] with the N values where the mask is set, row by row, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _kl(kind: str, micro: TrainingBatch, logp: Tensor, logits: Tensor, ref_logits: Tensor | None) -> Tensor:
    if kind != EXACT_KL:
        return kl_penalty(logp, micro.ref_logprobs, kind)
    if ref_logits is None:
        raise ValueError("expected the reference's logits for the full KL, got none; compute them for this micro-batch")
    return at_mask(micro.response_mask, exact_kl(logits, ref_logits))
