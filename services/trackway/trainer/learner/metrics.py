"""What a batch looks like, under the names that verl's dashboards know (verl/trainer/ppo/metric_utils.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trackway.trainer.learner.batch import Selection, TrainingBatch
from trackway.wire.trajectory import StopReason, Trajectory


def batch_metrics(selection: Selection, batch: TrainingBatch) -> dict[str, float]:
    """Scores, advantages, lengths, turns and counts of the trajectories trained on.

    Advantages weigh each trajectory by its model tokens, as in verl. `response_length/clip_ratio` is the share that
    stopped because the response was full.
    """
    kept = selection.kept
    scores = scores_of(kept)
    per_token = batch.advantages.unsqueeze(-1).expand_as(batch.response_mask)[batch.response_mask].tolist()
    full = [t.stop_reason is StopReason.MAX_RESPONSE for t in kept]
    return {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", scores),
        **_spread("critic/advantages", per_token),
        **_spread("critic/returns", per_token),
        **_spread("response_length", [len(t.response_ids) for t in kept]),
        "response_length/clip_ratio": sum(full) / len(kept),
        **_spread("prompt_length", [len(t.prompt_ids) for t in kept]),
        **_spread("num_turns", [t.num_turns for t in kept]),
        "perf/total_num_tokens": float(batch.lengths.sum()),
        "training/trained_tokens": float(batch.response_mask.sum()),
        **_counts(selection),
    }


def drift_metrics(logp: Tensor, rollout_logp: Tensor) -> dict[str, float]:
    """How far the trainer's logprobs are from the sampler's, over N model tokens under equal weights.

    In float32 the largest |dlogp| is below 1e-4; above 1 the mask, the ids or the temperature are wrong.
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


def _counts(selection: Selection) -> dict[str, float]:
    left_out = sum(selection.left_out.values())
    return {
        "training/trajectories": float(len(selection.kept)),
        "response/aborted_ratio": left_out / (left_out + len(selection.kept)),
        **{f"training/left_out/{reason}": float(count) for reason, count in selection.left_out.items()},
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def scores_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """The scores of trajectories that all have one."""
    return [t.reward.score for t in trajectories if t.reward is not None]
