"""The section `algorithm.*`: advantages, the KL penalty in the reward, DAPO's filter, and the off-policy correction.

Key names and defaults are verl's (verl/trainer/config/ppo_trainer.yaml, verl/trainer/config/algorithm.py) unless the
field says otherwise.
"""

import re
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from trackway.run_config.rollout_correction import RolloutCorrectionConfig
from trackway.run_config.section import Section

ESTIMATORS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "gae", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)
"""Names of `adv_estimator`: the functions marked `@estimator` in `trackway.learner.advantages`. They are listed
here because a configuration is read without torch."""
OPTIMAL_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that need the policy's distribution at each token."""
OWN_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:function`, the name of a user's own function."""


def known_function(name: str, known: Sequence[str]) -> str:
    """The name, if it is a known one or `module:function`. Raises ValueError naming the known ones."""
    if name in known or OWN_FUNCTION.fullmatch(name):
        return name
    raise ValueError(f"expected one of {', '.join(known)}, or an own function as module:function, got {name!r}")


class KlControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` multiplies the coefficient after each step by 1 + clip(KL / `target_kl` - 1, -0.2, 0.2) x trajectories
    / `horizon` (arXiv:1909.08593). It is part of checkpoints."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient, or the first one of `adaptive`."""
    horizon: int = Field(default=10000, ge=1)
    """Trajectories over which `adaptive` corrects an error."""
    target_kl: float = Field(default=0.1, gt=0)
    """KL that `adaptive` keeps: the mean over trajectories of the mean over tokens."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): groups without a difference are replaced."""

    enable: bool = False
    """Replace each group whose rollouts all have the same value of `metric` by a group of the next prompt. Its
    advantages would be zero. Updates are counted as without it, so the rows are passed more often."""
    metric: str | None = "reward"
    """`reward` (also `seq_reward`, `seq_final_reward`), the reward before any KL; `score`, before the penalty on long
    responses; or a component of the reward, such as `acc`, which is the score where a scorer returns none."""
    max_num_gen_batches: int = 0
    """Generation batches of `data.gen_batch_size` prompts, or of `data.train_batch_size`, that one step may take. The
    run fails when they are not enough. 0 or less means no limit other than the number of rows."""


class AlgorithmConfig(Section):
    """Computation of advantages from rewards."""

    adv_estimator: str = "grpo"
    """Estimator of advantages. Gae is PPO, with a value model (`critic.*`). verl's default is gae."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation in the grpo estimators and gdpo. false is Dr.GRPO."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per model token in `gae` and `reinforce_plus_plus`. Other estimators do not discount."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of `gae` per model token: 1 takes the rewards to go, 0 only the next value."""
    gdpo_reward_keys: list[str] | None = None
    """Reward components that `gdpo` normalises one by one. `score` is the score itself."""
    gdpo_reward_weights: list[float] | None = None
    """Weights of `gdpo_reward_keys`; null weighs all alike."""
    use_kl_in_reward: bool = False
    """Subtract `kl_ctrl.kl_coef` times the KL against the reference policy from the reward of each token."""
    kl_penalty: Literal[
        "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
    ] = "kl"
    """Estimator of that KL, from the old policy's logprobs; with `bypass_mode` or `loglinear` from the sampler's. A
    name with `+` has the value of the name without it: a reward has no gradient."""
    kl_ctrl: KlControlConfig = Field(default_factory=KlControlConfig)
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)

    @field_validator("adv_estimator")
    @classmethod
    def _estimator_is_known(cls, name: str) -> str:
        return known_function(name, ESTIMATORS)

    @model_validator(mode="after")
    def _filter_has_a_metric(self) -> Self:
        if not self.filter_groups.enable:
            return self
        if not self.filter_groups.metric:
            raise ValueError("filter_groups.metric: expected a name with filter_groups.enable=true, got null; take acc")
        if self.filter_groups.metric == "seq_final_reward" and self.use_kl_in_reward:
            raise ValueError(
                "filter_groups.metric: expected a metric that is known before the update, got seq_final_reward with "
                "use_kl_in_reward=true; take seq_reward"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_has_its_rewards(self) -> Self:
        if self.adv_estimator != "gdpo":
            return self
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if not keys:
            raise ValueError(
                "gdpo_reward_keys: expected reward components with adv_estimator=gdpo, got none; name them"
            )
        if weights is not None and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights: expected one for each of the {len(keys)} gdpo_reward_keys, got {len(weights)}"
            )
        if self.use_kl_in_reward:
            raise ValueError(
                "use_kl_in_reward: expected false with adv_estimator=gdpo, which takes reward components, got true; "
                "use actor.use_kl_loss"
            )
        return self
