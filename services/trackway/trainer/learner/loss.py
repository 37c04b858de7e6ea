"""The loss of a micro-batch: the clipped policy loss, less the entropy bonus, plus the KL penalty."""

from typing import NamedTuple

import torch
from torch import Tensor

from trackway.trainer.learner.algorithm import (
    EXACT_KL,
    Aggregation,
    aggregate,
    entropy_from_logits,
    exact_kl,
    kl_penalty,
    policy_loss,
)
from trackway.trainer.learner.batch import TrainingBatch
from trackway.trainer.learner.config import LearnerConfig


class MicroLoss(NamedTuple):
    """A micro-batch's share of its mini-batch."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logp: Tensor
    """[N]: logprobs of the model tokens, without a gradient."""


def micro_loss(
    config: LearnerConfig, micro: TrainingBatch, logits: Tensor, ref_logits: Tensor | None, agg: Aggregation
) -> MicroLoss:
    """The loss from the policy's tempered logits [N, V] at the response mask; the full KL needs `ref_logits` [N, V]."""
    mask = micro.response_mask
    logp = at_mask(mask, token_logprobs(logits, micro))
    pg_loss, stats = policy_loss(
        logp,
        micro.old_logprobs,
        micro.advantages,
        mask,
        config.clip_ratio_low,
        config.clip_ratio_high,
        config.clip_ratio_c,
        agg,
    )
    with torch.set_grad_enabled(config.entropy_coeff != 0.0):
        entropy = aggregate(at_mask(mask, entropy_from_logits(logits)), mask, agg)
    loss = pg_loss - config.entropy_coeff * entropy
    metrics = {f"actor/{name}": value for name, value in stats._asdict().items()}
    metrics |= {"actor/pg_loss": pg_loss.detach(), "actor/entropy": entropy.detach()}
    if config.entropy_coeff != 0.0:
        metrics["actor/entropy_loss"] = entropy.detach()
    if config.use_kl_loss:
        kl_loss = aggregate(_kl(config.kl_loss_type, micro, logp, logits, ref_logits), mask, agg)
        loss = loss + config.kl_loss_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss.detach()
    return MicroLoss(loss, metrics, logp.detach()[mask])


def token_logprobs(logits: Tensor, batch: TrainingBatch) -> Tensor:
    """[N]: logprobs of the predicted tokens under the response mask, from the logits [N, V] there."""
    targets = batch.input_ids[:, 1:][batch.response_mask]
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def at_mask(mask: Tensor, values: Tensor) -> Tensor:
    """[B, T] with the N values where the mask is set, row by row, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _kl(kind: str, micro: TrainingBatch, logp: Tensor, logits: Tensor, ref_logits: Tensor | None) -> Tensor:
    if kind != EXACT_KL:
        return kl_penalty(logp, micro.ref_logprobs, kind)
    if ref_logits is None:
        raise ValueError("expected the reference's logits for the full KL, got none; compute them for this micro-batch")
    return at_mask(micro.response_mask, exact_kl(logits, ref_logits))
