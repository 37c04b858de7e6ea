"""Off-policy correction as pure functions of tensors: importance weights, rejection, and verl's `rollout_corr/*`.

Formulas, bounds and names are verl's (verl/trainer/ppo/rollout_corr_helper.py). Shapes are B trajectories by T
predicted tokens. The log ratio is log p_train - log p_rollout, of the policy that the correction leads to and the
sampler. A row without a model token, such as a session's call that was wholly guided, counts in no mean, extreme or
share.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trackway.learner.algorithm import LOG_RATIO_BOUND
from trackway.learner.measuring import Metrics
from trackway.run_config.rollout_correction import RatioBounds, Rejection, RolloutCorrectionConfig

SMALLEST_MEAN = 1e-8
"""Weights with a smaller mean are not divided by it."""


class Correction(NamedTuple):
    """Weights and masks of a batch's tokens."""

    weights: Tensor | None
    """[B, T]: factor of each token's loss, zero outside the mask, or None without `rollout_is`."""
    mask: Tensor
    """[B, T] bool: the model tokens that `rollout_rs` keeps."""


def correct(
    config: RolloutCorrectionConfig, log_ratio: Tensor, mask: Tensor, weights_mean: float | None = None
) -> Correction:
    """The weights and the mask of a batch; log_ratio, mask: [B, T].

    Nothing but the mean of `rollout_is_batch_normalize` depends on other rows: give that of the whole batch as
    `weights_mean` for a part of it.
    """
    kept = mask
    for rejection in config.rejections:
        kept = kept & keeps(rejection, log_ratio, mask)
    if config.weight_level is None:
        return Correction(None, kept)
    weights = bounded(importance_weights(log_ratio, mask, config.weight_level), config.is_bounds)
    if config.rollout_is_batch_normalize:
        mean = mean_weight(config, log_ratio, mask) if weights_mean is None else weights_mean
        weights = weights / mean
    return Correction(weights, kept)


def importance_weights(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp of the log ratio of each token, or of its sum over the sequence (`sequence`), clamped to exp(+-20): [B, T].

    Zero outside the mask.
    """
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() * mask


def bounded(weights: Tensor, bounds: RatioBounds) -> Tensor:
    """Weights truncated to `high`, or zero outside [low, high] (IcePop); the shape of `weights`.

    Truncation: https://fengyao.notion.site/off-policy-rl.
    """
    if bounds.low is None:
        return weights.clamp(max=bounds.high)
    return weights * ((weights >= bounds.low) & (weights <= bounds.high))


def mean_weight(config: RolloutCorrectionConfig, log_ratio: Tensor, mask: Tensor) -> float:
    """Return the mean weight of the tokens, or of the sequences. 1 if it is zero. `rollout_is_batch_normalize` divides
    by it.
    """
    level = config.weight_level or "token"
    weights = bounded(importance_weights(log_ratio, mask, level), config.is_bounds)
    values = weights[mask] if level == "token" else _over_tokens(weights, mask)[mask.any(-1)]
    mean = float(values.mean())
    return mean if mean > SMALLEST_MEAN else 1.0


def divergence(kind: str, log_ratio: Tensor) -> Tensor:
    """k1 = -log r, k2 = (log r)^2 / 2 or k3 = r - 1 - log r of clamped log ratios; the shape of `log_ratio`."""
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return -clamped
    return 0.5 * clamped.square() if kind == "k2" else clamped.exp() - 1 - clamped


def measure(name: str, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Measure of a name of `rollout_rs`: [B, T] for `token_*`, else [B, 1]."""
    level, _, kind = name.rpartition("_")
    values = divergence(kind, log_ratio)
    if level == "token":
        return values
    if level == "seq_max":
        return values.masked_fill(~mask, float("-inf")).amax(-1, keepdim=True)
    total = (values * mask).sum(-1, keepdim=True)
    return total if level == "seq_sum" else total / mask.sum(-1, keepdim=True).clamp(min=1)


def keeps(rejection: Rejection, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B, T] or [B, 1] bool: whether a criterion keeps each token, or each sequence."""
    values = measure(rejection.name, log_ratio, mask)
    kept = values <= rejection.high
    return kept if rejection.low is None else kept & (values >= rejection.low)


def loglinear_logprobs(logp: Tensor, rollout_logp: Tensor, share: Tensor) -> Tensor:
    """Estimated logprobs of the policy before the update, without a gradient: all [B, T].

    They lie on the line between the sampler's logprobs (`share` 0) and the trained policy's (`share` 1): AReaL's
    log-linear approximation (`prox_logp_method`). `share` is `loglinear_share`'s.
    """
    return rollout_logp + share * (logp.detach() - rollout_logp)


def loglinear_share(versions: Tensor, version: float) -> Tensor:
    """(v_prox - v_behave) / (v_theta - v_behave) of each token, in [0, 1): the shape of `versions`.

    `versions` sampled the tokens (v_behave). `version` names the weights before the update, whose logprobs a
    recomputing pass would give (v_prox). The trained policy counts as `version + 1`, which it will be published as,
    during the whole update: at the first optimizer step it still equals v_prox, and moves away with each. AReaL counts
    both one lower. A token of `version` or newer has share 0: the sampler's logprobs are the old ones.
    """
    behind = (version - versions).clamp(min=0)
    return behind / (behind + 1)


def correction_metrics(config: RolloutCorrectionConfig, logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Metrics:
    """All `rollout_corr/*` of a batch before the correction; logp, rollout_logp, mask: [B, T].

    Divergences always, weights with `rollout_is`, rejection with `rollout_rs`. Raises ValueError without a model token.
    """
    if not bool(mask.any()):
        raise ValueError("expected a model token in the mask, got none; drop such trajectories first")
    logp, rollout_logp, mask = (values[mask.any(-1)] for values in (logp, rollout_logp, mask))
    log_ratio = (logp - rollout_logp) * mask
    metrics = divergence_metrics(logp, rollout_logp, mask)
    if config.weight_level is not None:
        metrics |= _weight_metrics(config, log_ratio, mask)
    if config.rollout_rs is not None:
        metrics |= _rejection_metrics(config.rejections, log_ratio, mask)
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def divergence_metrics(logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """KL, perplexities and chi-square of the trained policy against the sampler; logp, rollout_logp, mask: [B, T].

    Means are over model tokens, and over sequences for perplexities and `chi2_seq`.
    """
    log_ratio = (logp - rollout_logp) * mask
    tokens = log_ratio[mask]
    training, rollout = -_over_tokens(logp, mask), -_over_tokens(rollout_logp, mask)
    gap = training - rollout
    clamped, summed = (values.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) for values in (tokens, log_ratio.sum(-1)))
    return {
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "kl": -tokens.mean(),
        "k3_kl": (tokens.exp() - tokens - 1).mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": (2 * clamped).exp().mean() - 1,
        "chi2_seq": (2 * summed).exp().mean() - 1,
    }


def _weight_metrics(config: RolloutCorrectionConfig, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor | float]:
    """`rollout_is_*`, of the weights before they are divided by their mean.

    The lower bound of TIS, which only these metrics use, is 1 / the upper one.
    """
    level, bounds = config.weight_level or "token", config.is_bounds
    low = 1 / bounds.high if bounds.low is None else bounds.low
    raw = importance_weights(log_ratio, mask, level)
    weights = bounded(raw, bounds)
    tokens, raw_tokens = weights[mask], raw[mask]
    mean, sequences, raw_sequences = tokens.mean(), _over_tokens(weights, mask), _over_tokens(raw, mask)
    if level == "sequence":
        summed = log_ratio.sum(-1)
        largest, smallest = summed.max().clamp(max=LOG_RATIO_BOUND).exp(), summed.min().exp()
        logs = torch.tensor((bounds.high, low), dtype=summed.dtype).log()
        high_share, low_share = _share(summed > logs[0]), _share(summed < logs[1])
    else:
        largest, smallest = tokens.max(), tokens.min()
        high_share, low_share = _share(raw_tokens > bounds.high), _share(raw_tokens < low)
    metrics: dict[str, Tensor | float] = {
        "mean": mean,
        "max": largest,
        "min": smallest,
        "std": tokens.std(correction=0),
        "ratio_fraction_high": high_share,
        "ratio_fraction_low": low_share,
        "eff_sample_size": mean.square() / tokens.square().mean() if mean > 0 else 0.0,
        "seq_mean": sequences.mean(),
        "seq_std": _std(sequences),
        "seq_max": sequences.max(),
        "seq_min": sequences.min(),
        "seq_max_deviation": (sequences - 1).abs().max(),
        "seq_fraction_high": _share(raw_sequences > bounds.high),
        "seq_fraction_low": _share(raw_sequences < low),
    }
    if bounds.low is not None:
        metrics["oob_ratio"] = _share((raw_tokens < low) | (raw_tokens > bounds.high))
    if config.rollout_is_batch_normalize:
        metrics["batch_norm_factor"] = mean_weight(config, log_ratio, mask)
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def _rejection_metrics(rejections: Sequence[Rejection], log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor | float]:
    """`rollout_rs_*`: shares of model tokens and of sequences with a token that is left out, in all and by name."""
    metrics: dict[str, Tensor | float] = {}
    kept = mask
    for rejection in rejections:
        passed = keeps(rejection, log_ratio, mask) & mask
        kept = kept & passed
        named = _measure_metrics(rejection, log_ratio, mask) | _masked_shares(passed, mask)
        metrics |= {f"rollout_rs_{rejection.name}_{name}": value for name, value in named.items()}
    return metrics | {f"rollout_rs_{name}": value for name, value in _masked_shares(kept, mask).items()}


def _measure_metrics(rejection: Rejection, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor | float]:
    values = measure(rejection.name, log_ratio, mask)
    by_token = values.expand_as(mask)[mask]
    by_sequence = _over_tokens(values, mask) if values.shape == mask.shape else values.squeeze(-1)
    extremes = by_token if values.shape == mask.shape else by_sequence
    low = rejection.low
    metrics: dict[str, Tensor | float] = {
        "mean": by_token.mean(),
        "max": extremes.max(),
        "min": extremes.min(),
        "fraction_high": _share(extremes > rejection.high),
        "fraction_low": 0.0 if low is None else _share(extremes < low),
        "std": by_token.clamp(0.0 if low is None else low, rejection.high).std(correction=0),
        "seq_mean": by_sequence.mean(),
        "seq_std": _std(by_sequence),
        "seq_max": by_sequence.max(),
        "seq_min": by_sequence.min(),
        "seq_max_deviation": by_sequence.abs().max(),
        "seq_fraction_high": _share(by_sequence > rejection.high),
    }
    return metrics if low is None else {**metrics, "seq_fraction_low": _share(by_sequence < low)}


def _masked_shares(kept: Tensor, mask: Tensor) -> dict[str, Tensor | float]:
    rejected = mask & ~kept
    return {"masked_fraction": _share(rejected[mask]), "seq_masked_fraction": _share(rejected.any(-1))}


def _over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[B]: mean over each sequence's model tokens of values [B, T]. 0 without one."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def _share(hits: Tensor) -> Tensor:
    return hits.double().mean()


def _std(values: Tensor) -> Tensor | float:
    return values.std() if len(values) > 1 else 0.0
