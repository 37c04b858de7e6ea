"""The distillation loss: the student's logprobs of its own tokens against a teacher's.

Formulas, clamps and metrics are verl's (verl/trainer/distillation/losses.py and fsdp/losses.py, release 0.9.1). The
teacher's logprobs are at temperature 1, the student's at the temperature of its rollouts, as in verl.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trackway.learner.algorithm import kl_penalty, ppo_loss
from trackway.learner.batch import TrainingBatch
from trackway.learner.head import TokenLogits, TopTokens
from trackway.learner.measuring import Metrics
from trackway.learner.policy_losses import LossInputs
from trackway.run_config.distillation import DistillationLossConfig

DUAL_CLIP = 3.0
"""verl's `clip_ratio_c`, which its distillation loss has no key for."""


def estimate_losses(config: DistillationLossConfig, logp: Tensor, teacher_logp: Tensor) -> Tensor:
    """[B, T]: the reverse KL of each sampled token, estimated from logprobs [B, T] of student and teacher."""
    return kl_penalty(logp, teacher_logp, config.loss_mode)


def distillation_loss(
    config: DistillationLossConfig, inputs: LossInputs, losses: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch from its tokens' losses [B, T], and metrics that add up over micro-batches.

    With `use_policy_gradient` the negative losses are the advantages of PPO's clipped loss.
    """
    metrics = {} if config.uses_topk else {"abs_loss": inputs.token_mean(losses.abs())}
    if config.loss_max_clamp is not None:
        losses = losses.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    if config.use_policy_gradient:
        loss, stats = ppo_loss(
            inputs.logp,
            inputs.old_logp,
            -losses.detach(),
            inputs.mask,
            config.clip_ratio_low,
            config.clip_ratio_high,
            DUAL_CLIP,
            inputs.agg,
            inputs.weights,
        )
        metrics |= stats._asdict()
    else:
        loss = inputs._replace(weights=None).total(losses)
    return loss, {f"distillation/{name}": value for name, value in (metrics | {"loss": loss.detach()}).items()}


def distillation_metrics(mini: TrainingBatch, measured: Sequence[Tensor]) -> Metrics:
    """Metrics of a mini-batch from its tokens, [b, T] each: their losses, then the other measures of topk.

    Empty without any. verl takes the mean over micro-batches of their means. Here it is the mean over tokens.
    """
    if not measured:
        return {}
    mask = mini.response_mask
    losses, *of_topk = (values[mask] for values in measured)
    metrics = {"loss_min": losses.min(), "loss_max": losses.max()}
    if of_topk and mini.teacher_top_logprobs is not None:
        student, overlap, advantage = of_topk
        teacher = mini.teacher_top_logprobs[mask].exp().sum(-1)
        for name, mass in (("student", student), ("teacher", teacher)):
            metrics |= {f"{name}_mass": mass.mean(), f"{name}_mass_min": mass.min(), f"{name}_mass_max": mass.max()}
        metrics["overlap_ratio"] = overlap.mean() / mini.teacher_top_logprobs.shape[-1]
        metrics["overlap_token_advantage"] = advantage.sum() / (overlap > 0).sum().clamp(min=1)
    return {f"distillation/{name}": float(value) for name, value in metrics.items()}


class TopkMeasures:
    """Measures of `forward_kl_topk`: the student's logits at the teacher's k most likely tokens."""

    def __init__(self, config: DistillationLossConfig) -> None:
        self._least = config.log_prob_min_clamp

    def loss(self, tokens: TokenLogits) -> Tensor:
        """[n]: sum_k p (log p - log q) of teacher p and student q, at least 0: k tokens are not the whole mass."""
        student, teacher = self._logprobs(tokens)
        return self._clamped_kl(student, teacher).sum(-1).clamp_min(0.0)

    @torch.no_grad()
    def student_mass(self, tokens: TokenLogits) -> Tensor:
        """[n]: the student's probability of the teacher's k tokens."""
        return self._logprobs(tokens)[0].exp().sum(-1)

    @torch.no_grad()
    def overlap(self, tokens: TokenLogits) -> Tensor:
        """[n]: how many of these tokens are the student's k most likely ones too (arXiv:2604.13016)."""
        return self._is_shared(tokens).sum(-1).to(tokens.logits.dtype)

    @torch.no_grad()
    def overlap_token_advantage(self, tokens: TokenLogits) -> Tensor:
        """[n]: the mean of -p (log p - log q) over the shared tokens; 0 without one."""
        shared = self._is_shared(tokens)
        kl = self._clamped_kl(*self._logprobs(tokens))
        return -(kl * shared).sum(-1) / shared.sum(-1).clamp_min(1)

    def _clamped_kl(self, student: Tensor, teacher: Tensor) -> Tensor:
        """[n, k]."""
        if self._least is not None:
            student, teacher = student.clamp_min(self._least), teacher.clamp_min(self._least)
        return teacher.exp() * (teacher - student)

    def _logprobs(self, tokens: TokenLogits) -> tuple[Tensor, Tensor]:
        """[n, k] each: logprobs of student and teacher."""
        top = _required(tokens)
        student = tokens.logits.gather(-1, top.ids) - tokens.logits.logsumexp(-1, keepdim=True)
        return student, top.logprobs.to(student.dtype)

    def _is_shared(self, tokens: TokenLogits) -> Tensor:
        ids = _required(tokens).ids
        own = tokens.logits.topk(ids.shape[-1], dim=-1).indices
        return (ids.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)


def _required(tokens: TokenLogits) -> TopTokens:
    if tokens.top is None:
        raise ValueError("expected a teacher's most likely tokens, got none; score the trajectories with topk first")
    return tokens.top
