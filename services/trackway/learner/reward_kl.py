"""The KL penalty in the reward: its value, and the controller of its coefficient.

Formulas and names are verl's (`apply_kl_penalty` in verl/trainer/ppo/ray_trainer.py, `AdaptiveKLController` in
verl/trainer/ppo/core_algos.py).
"""

from torch import Tensor

from trackway.run_config.algorithm import KlControlConfig

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
