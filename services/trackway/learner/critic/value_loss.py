"""PPO's clipped value loss (arXiv:1707.06347; verl's `compute_value_loss` in verl/trainer/ppo/core_algos.py)."""

from typing import NamedTuple

import torch
from torch import Tensor

from trackway.learner.algorithm import Aggregation, aggregate


class ValueStats(NamedTuple):
    """Means over the model tokens of the mini-batch. The stats of its micro-batches add up."""

    vf_clipfrac: Tensor
    """Share of tokens whose clipped loss exceeds the unclipped one."""
    vpred_mean: Tensor
    """Mean of the predicted values."""


def value_loss(
    predicted: Tensor, values: Tensor, returns: Tensor, mask: Tensor, cliprange: float, agg: Aggregation
) -> tuple[Tensor, ValueStats]:
    """Half the aggregate of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), and its statistics.

    predicted (V), values (V_old), returns (R), mask: [B, T]; cliprange (c): positive. The clip bounds how far one
    update moves a value: beyond it, a token's loss has no gradient that would move it further away from V_old.
    """
    clipped = predicted.clamp(values - cliprange, values + cliprange)
    losses, clipped_losses = (predicted - returns).square(), (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(losses, clipped_losses), mask, agg)
    by_tokens = agg._replace(mode="token-mean")
    with torch.no_grad():
        stats = ValueStats(
            vf_clipfrac=aggregate((clipped_losses > losses).to(losses.dtype), mask, by_tokens),
            vpred_mean=aggregate(predicted, mask, by_tokens),
        )
    return loss, stats
