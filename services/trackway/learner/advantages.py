"""Estimators of advantages, by the name of `algorithm.adv_estimator`.

A new one is a function here marked `@estimator`, and its name in `config.algorithm.ESTIMATORS`. A user's own is named
`module:function`.
Formulas are verl's (verl/trainer/ppo/core_algos.py, release 0.9.1). Shapes are B trajectories by R response tokens: a
row starts with the first token of the response.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from trackway.learner.algorithm import grpo_advantages, members_of
from trackway.learner.filtering import REWARD_BASELINE
from trackway.run_config.algorithm import AlgorithmConfig
from trackway.serving.user_code import own_function

STD_EPS = 1e-6
"""Added to the standard deviation of a group's scores."""
VARIANCE_EPS = 1e-8
"""Added to the variance that whitening divides by."""
BASELINE_EPS = 1e-8
"""Added to the sum of weights that an optimal baseline divides by."""
UNDISCOUNTED = ("remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators with rewards to go that `gamma` does not discount, as in verl."""


class AdvantageInputs(NamedTuple):
    """Inputs of the advantages of a batch."""

    rewards: Tensor
    """[B, R] float64: the parts of the score at their tokens and the rest at the last model token, less the KL penalty
    of each token; zero elsewhere."""
    mask: Tensor
    """[B, R] bool: the tokens to train on."""
    groups: Sequence[str]
    """B keys. Trajectories of one prompt have the same."""
    components: Sequence[Mapping[str, float]]
    """B: the reward's components by name, and `score`."""
    logp: Tensor | None = None
    """[B, R]: logprobs of the policy before the update, of which `sum_pi_squared` is."""
    sum_pi_squared: Tensor | None = None
    """[B, R]: sum over the vocabulary of its squared probabilities, or None unless `calculate_sum_pi_squared`."""
    weights: Tensor | None = None
    """[B, R]: importance weights of the off-policy correction, or None for 1."""
    values: Tensor | None = None
    """[B, R]: the value before each token of the mask, of a value model, or None without one."""

    @property
    def scores(self) -> Tensor:
        """[B]: the sum of each trajectory's rewards."""
        return self.rewards.sum(1)


Estimator: TypeAlias = Callable[[AlgorithmConfig, AdvantageInputs], Tensor]
"""Returns the advantage of each trajectory [B], or of each token [B, R], of which those outside the mask are unused."""

ESTIMATORS: dict[str, Estimator] = {}
"""Estimators by name."""


def estimator(function: Estimator) -> Estimator:
    """Register an estimator under the function's name."""
    ESTIMATORS[function.__name__] = function
    return function


@estimator
def grpo(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """Group relative policy optimization (arXiv:2402.03300), without the division Dr. GRPO (arXiv:2503.20783)."""
    return grpo_advantages(inputs.scores, inputs.groups, config.norm_adv_by_std_in_grpo, STD_EPS)


@estimator
def grpo_vectorized(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """`grpo`: verl's two implementations have the same values."""
    return grpo(config, inputs)


@estimator
def grpo_passk(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """GRPO for pass@k (arXiv:2503.19595): only the best of a group has an advantage, its lead over the second.

    A group of one, whose other rollouts failed, lacks an advantage.
    """
    scores, advantages = inputs.scores, torch.zeros_like(inputs.scores)
    for rows in members_of(inputs.groups):
        if len(rows) == 1:
            continue
        (best, second), places = scores[rows].topk(2)
        lead = best - second
        advantages[rows[int(places[0])]] = (
            lead / (scores[rows].std() + STD_EPS) if config.norm_adv_by_std_in_grpo else lead
        )
    return advantages


@estimator
def gae(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """Generalized advantage estimates of a value model (arXiv:1506.02438), as PPO has them; whitened over the batch."""
    return _whitened(generalized_advantages(inputs, config.gamma, config.lam), inputs.mask) * inputs.mask


@estimator
def rloo(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): the score less the mean of the others; of one, the score."""
    advantages = _centred(inputs.scores, inputs.groups)
    for rows in members_of(inputs.groups):
        advantages[rows] *= len(rows) / max(1, len(rows) - 1)
    return advantages


@estimator
def rloo_vectorized(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """`rloo`, but a group of one has no advantage."""
    advantages = rloo(config, inputs)
    for rows in members_of(inputs.groups):
        if len(rows) == 1:
            advantages[rows] = 0.0
    return advantages


@estimator
def opo(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """On-policy optimization (arXiv:2505.23585): the baseline is the group's mean weighted by trained tokens."""
    scores, lengths, advantages = inputs.scores, inputs.mask.sum(1).double(), inputs.scores.clone()
    for rows in members_of(inputs.groups):
        if len(rows) > 1:
            advantages[rows] -= (lengths[rows] * scores[rows]).sum() / lengths[rows].sum().clamp(min=1)
    return advantages


@estimator
def gpg(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """Group policy gradient (arXiv:2504.02546): centred scores times B / (scores that are not zero)."""
    alpha = len(inputs.scores) / max(1, int(inputs.scores.count_nonzero()))
    return alpha * _centred(inputs.scores, inputs.groups)


@estimator
def gdpo(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """Group reward-decoupled normalization (arXiv:2601.05242): GRPO of each component, weighted, summed, whitened.

    Raises ValueError for a trajectory without one of `gdpo_reward_keys`.
    """
    keys = config.gdpo_reward_keys or []
    weighted = torch.zeros_like(inputs.scores)
    for key, weight in zip(keys, config.gdpo_reward_weights or [1.0] * len(keys), strict=True):
        lacking = next((components for components in inputs.components if key not in components), None)
        if lacking is not None:
            got = ", ".join(lacking) or "none"
            raise ValueError(
                f"algorithm.gdpo_reward_keys: expected {key!r} among the reward components of each trajectory, got "
                f"{got}; return it from the scorer"
            )
        scores = torch.tensor([components[key] for components in inputs.components], dtype=torch.float64)
        weighted += weight * grpo_advantages(scores, inputs.groups, config.norm_adv_by_std_in_grpo, STD_EPS)
    return _whitened(weighted, inputs.mask)


@estimator
def reinforce_plus_plus(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262): the discounted rewards to go of each token, whitened over the batch."""
    return _whitened(rewards_to_go(inputs.rewards, inputs.mask, config.gamma), inputs.mask)


@estimator
def reinforce_plus_plus_baseline(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262), whitened over the batch's tokens."""
    return _whitened(_centred(inputs.scores, inputs.groups), inputs.mask)


@estimator
def remax(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """ReMax (arXiv:2310.10505): the rewards to go less the score of a greedy rollout of the same prompt.

    Raises ValueError for a trajectory without the component `reward_baseline`, which the training loop sets.
    """
    if not all(REWARD_BASELINE in components for components in inputs.components):
        raise ValueError(f"expected the component {REWARD_BASELINE!r} of each reward, got a trajectory without it")
    baselines = torch.tensor([[components[REWARD_BASELINE]] for components in inputs.components], dtype=torch.float64)
    return rewards_to_go(inputs.rewards, inputs.mask) - baselines * inputs.mask


@estimator
def optimal_token_baseline(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """Optimal token baseline (https://yingru.notion.site/The-Optimal-Token-Baseline-399211a558b782cfa936014c0d42dfb8).

    At each position of the response, the baseline is the mean of the group's rewards to go, weighted by
    W = cumulative (1 - 2 pi + sum pi^2) w^2 over the tokens of the model, w being the importance weight. A group of one
    has none, and neither has the longest trajectory beyond the end of the second longest.
    """
    to_go = rewards_to_go(inputs.rewards, inputs.mask)
    return to_go - _optimal_baselines(to_go, _path_variance(inputs), inputs.mask, inputs.groups)


@estimator
def tir_optimal_token_baseline(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """`optimal_token_baseline` for trajectories with tools: positions count trained tokens, not observations."""
    to_go, mask = rewards_to_go(inputs.rewards, inputs.mask), inputs.mask
    # A stable sort by "is not trained" moves each row's trained tokens to its front, in their order.
    order = torch.argsort(~mask, dim=1, stable=True)
    to_go_packed, variance, packed = (values.gather(1, order) for values in (to_go, _path_variance(inputs), mask))
    baselines = _optimal_baselines(to_go_packed, variance, packed, inputs.groups)
    return to_go - torch.zeros_like(to_go).scatter(1, order, baselines)


def estimate(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """[B] or [B, R] float64: the advantages of a batch, by the estimator that is configured.

    Raises ValueError when an own estimator cannot be loaded or returns another shape.
    """
    advantages = estimator_of(config.adv_estimator)(config, inputs).double()
    shapes = [inputs.mask.shape[:1], inputs.mask.shape]
    if advantages.shape not in shapes:
        raise ValueError(
            f"algorithm.adv_estimator={config.adv_estimator}: expected advantages of shape {list(shapes[0])} or "
            f"{list(shapes[1])}, got {list(advantages.shape)}; return one per trajectory or one per response token"
        )
    return advantages


def estimator_of(name: str) -> Estimator:
    """The estimator of a name. Raises ValueError when an own one, `module:function`, cannot be loaded."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return cast(Estimator, own_function("algorithm.adv_estimator", name))


def token_rewards(scores: Sequence[float], mask: Tensor, placed: Tensor | None = None) -> Tensor:
    """[B, R] float64: each score at the last token of the mask [B, R], which every row has; zero elsewhere.

    `placed` [B, R] are parts of the scores at tokens of their own; each row sums to its score.
    """
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1, keepdim=True)
    values = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    if placed is None:
        placed = torch.zeros(mask.shape, dtype=torch.float64)
    return placed.scatter_add(1, last, values - placed.sum(1, keepdim=True))


def per_trajectory(advantages: Tensor, mask: Tensor) -> Tensor:
    """[B]: advantages [B], or the mean over the tokens of the mask of advantages [B, R]. 0 without such a token."""
    if advantages.dim() == 1:
        return advantages
    return (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """[B, R]: each token's reward and those after it, discounted by each token of the mask that they pass.

    Zero outside the mask; a reward there, such as the score at a rejected token, reaches the tokens before it.
    """
    to_go, after = torch.zeros_like(rewards), rewards.new_zeros(len(rewards))
    for column in reversed(range(rewards.shape[1])):
        after = rewards[:, column] + torch.where(mask[:, column], gamma * after, after)
        to_go[:, column] = after * mask[:, column]
    return to_go


def generalized_advantages(inputs: AdvantageInputs, gamma: float, lam: float) -> Tensor:
    """[B, R]: A = r + gamma V' - V + gamma lam A', where ' is the next token of the mask. 0 after the last one.

    Tokens between, such as observations, are no steps: the value and the advantage after them pass unchanged, and so
    does a reward there, such as the score at a rejected token. Zero outside the mask. (arXiv:1506.02438, equation 16;
    verl's `compute_gae_advantage_return`.) Raises ValueError without values.
    """
    if inputs.values is None:
        raise ValueError("expected the values of a value model for gae, got none; set critic.enable=true")
    rewards, values, mask = inputs.rewards, inputs.values.double(), inputs.mask
    advantages = torch.zeros_like(rewards)
    # Of the next token of the mask, [B] each: its value with the rewards before it, and its advantage.
    to_come = advantage = rewards.new_zeros(len(rewards))
    for column in reversed(range(rewards.shape[1])):
        is_step, reward = mask[:, column], rewards[:, column]
        error = reward + gamma * to_come - values[:, column]
        advantage = torch.where(is_step, error + gamma * lam * advantage, advantage)
        to_come = torch.where(is_step, values[:, column], to_come + reward)
        advantages[:, column] = advantage * is_step
    return advantages


def token_returns(config: AlgorithmConfig, inputs: AdvantageInputs) -> Tensor:
    """[B, R]: what a value of each token is an estimate of: the rewards to go, or those that `lam` of gae weighs.

    Zero outside the mask. With gae the return of a token is its advantage before whitening plus its value. Rewards of
    an estimator in UNDISCOUNTED are not discounted.
    """
    if config.adv_estimator == "gae" and inputs.values is not None:
        return generalized_advantages(inputs, config.gamma, config.lam) + inputs.values * inputs.mask
    gamma = 1.0 if config.adv_estimator in UNDISCOUNTED else config.gamma
    return rewards_to_go(inputs.rewards, inputs.mask, gamma)


def _centred(scores: Tensor, groups: Sequence[str]) -> Tensor:
    """Scores less the mean of their group. A group of one keeps its score. Equal scores give exactly 0."""
    return grpo_advantages(scores, groups, norm_by_std=False)


def _whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Values [B] or [B, R] less their mean over the mask's tokens, over their unbiased standard deviation there."""
    by_token = (values if values.dim() == 2 else values.unsqueeze(1)).expand(mask.shape)[mask]
    if not len(by_token):
        return torch.zeros_like(values)
    variance = by_token.var() if len(by_token) > 1 else torch.zeros(())
    return (values - by_token.mean()) * (variance + VARIANCE_EPS).rsqrt()


def _path_variance(inputs: AdvantageInputs) -> Tensor:
    """[B, R]: W, the cumulative squared norm of the gradients of the logprobs by the logits; zero outside the mask."""
    if inputs.logp is None or inputs.sum_pi_squared is None:
        raise ValueError(
            "expected the policy's distribution for an optimal token baseline, got none; set "
            "actor_rollout_ref.actor.calculate_sum_pi_squared=true"
        )
    squared_norm = 1 - 2 * inputs.logp.double().exp() + inputs.sum_pi_squared.double()
    if inputs.weights is not None:
        squared_norm = squared_norm * inputs.weights.double().square()
    return (squared_norm * inputs.mask).cumsum(1) * inputs.mask


def _optimal_baselines(to_go: Tensor, variance: Tensor, mask: Tensor, groups: Sequence[str]) -> Tensor:
    """[B, R]: at each position the mean of the group's rewards to go, weighted by the path variance."""
    ends = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1)
    baselines = torch.zeros_like(to_go)
    for rows in members_of(groups):
        if len(rows) == 1:
            continue
        baselines[rows] = (to_go[rows] * variance[rows]).sum(0) / (variance[rows].sum(0) + BASELINE_EPS)
        (_, second), places = ends[rows].topk(2)
        baselines[rows[int(places[0])], int(second) :] = 0.0
    return baselines
