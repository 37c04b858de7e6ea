"""The KL penalty in the reward: its value and coefficient by hand, in whole updates, and after a resume."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from tests.services.learner.test_golden_estimators import (
    GAMMA,
    Table,
    new_learner,
    places,
    saved_model,
    steps,
    whitened,
)
from tests.services.learner.test_golden_update import (
    MASKS,
    SAMPLED,
    SCORES,
    Model,
    Rollout,
    logprob,
    trajectories,
    weights_of,
)
from trackway.learner.algorithm import mean_kl, next_coefficient
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.run_config.algorithm import KlControlConfig

pytestmark = pytest.mark.slow

__all__ = ["saved_model"]

COEF, TARGET, HORIZON = 0.5, 0.01, 100


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),
        (0.11, 0.5 * (1 + 0.1 * 8 / 100)),
        (0.09, 0.5 * (1 - 0.1 * 8 / 100)),
        (0.12, 0.5 * (1 + 0.2 * 8 / 100)),
        (9.0, 0.5 * (1 + 0.2 * 8 / 100)),
        (-9.0, 0.5 * (1 - 0.2 * 8 / 100)),
    ],
)
def test_the_adaptive_coefficient_follows_a_bounded_share_of_the_error(kl: float, expected: float):
    adaptive = KlControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)

    assert next_coefficient(adaptive, 0.5, kl, 8) == pytest.approx(expected, rel=1e-12)
    assert next_coefficient(adaptive.with_values({"type": "fixed"}), 0.5, kl, 8) == 0.5


def test_the_mean_kl_is_over_trajectories_of_the_mean_over_their_tokens():
    kl = torch.tensor([[1.0, 99.0, 3.0], [5.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]], dtype=torch.bool)

    assert mean_kl(kl, mask) == (2 + 5) / 2


def scale_reference(learner: Learner) -> Model:
    """Makes the reference another model than the policy; gives it written out."""
    assert isinstance(learner.reference, Policy)
    with torch.no_grad():
        for parameter in learner.reference.model.parameters():
            parameter.mul_(1.25)
    return Model({name: weights * 1.25 for name, weights in weights_of(learner).items()})


def gaps(policy: Model, reference: Model, *, sampled: bool = False) -> Table:
    """Logprobs of the old policy less those of the reference, by token of the model."""

    def old(row: int, place: int) -> float:
        return SAMPLED[row][place] if sampled else logprob(policy, row, place)

    return [[old(row, place) - logprob(reference, row, place) for place in places(row)] for row in range(4)]


def penalised(kl: Table) -> Table:
    """Rewards of tokens: the score at the last, less the penalty of each."""
    return [[(j == len(row) - 1) * SCORES[i] - COEF * value for j, value in enumerate(row)] for i, row in enumerate(kl)]


def test_the_penalty_reaches_the_advantages_of_trajectories_as_its_sum(saved_model: Path, rollout: Rollout):
    keys = {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_ctrl.kl_coef": COEF}
    learner = new_learner(saved_model, keys)
    model, reference = Model(weights_of(learner)), scale_reference(learner)
    kl = gaps(model, reference)
    scores = [sum(row) for row in penalised(kl)]
    pairs = [scores[row] - scores[row + 1 if row % 2 == 0 else row - 1] for row in range(4)]
    steps(model, [[pairs[row]] * len(places(row)) for row in range(4)])

    result = learner.update(trajectories(rollout))

    for part, weights in weights_of(learner).items():
        np.testing.assert_allclose(weights, model.weights[part], rtol=0, atol=1e-11)
    assert result.advantages == pytest.approx(pairs, rel=1e-9)
    assert result.metrics["actor/reward_kl_penalty"] == pytest.approx(fmean(map(fmean, kl)), rel=1e-9)
    assert result.metrics["actor/reward_kl_penalty_coeff"] == COEF
    assert result.metrics["critic/rewards/mean"] == pytest.approx(fmean(scores), rel=1e-9)
    assert result.metrics["critic/score/mean"] == fmean(SCORES)
    assert "actor/kl_loss" not in result.metrics
    assert "actor/kl_coef" not in result.metrics


@pytest.mark.parametrize(
    ("estimator", "kind", "sampled"),
    [
        ({"adv_estimator": "reinforce_plus_plus", "gamma": GAMMA}, "mse", False),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": GAMMA}, "mse", True),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": GAMMA}, "mse+", False),
        ({"adv_estimator": "gae", "lam": GAMMA}, "mse", False),  # of a new value model, whose values are 0
    ],
)
def test_the_penalty_of_each_token_reaches_the_tokens_before_it(
    saved_model: Path, rollout: Rollout, estimator: dict[str, object], kind: str, sampled: bool
):
    keys = {**estimator, "kl_penalty": kind}
    learner = new_learner(saved_model, {**keys, "use_kl_in_reward": True, "kl_ctrl.kl_coef": COEF}, bypass_mode=sampled)
    model, reference = Model(weights_of(learner)), scale_reference(learner)
    rewards = penalised([[gap**2 / 2 for gap in row] for row in gaps(model, reference, sampled=sampled)])
    table = [[sum(r * GAMMA**k for k, r in enumerate(row[j:])) for j in range(len(row))] for row in rewards]

    result = learner.update(trajectories(rollout))

    assert result.advantages == pytest.approx([fmean(row) for row in whitened(table)], rel=1e-9)
    assert result.metrics["critic/returns/max"] == pytest.approx(max(map(max, table)), rel=1e-9)


def test_the_penalty_covers_rejected_tokens_and_the_advantages_do_not(saved_model: Path, rollout: Rollout):
    keys = {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_ctrl.kl_coef": COEF}
    learner = new_learner(saved_model, keys, rollout_rs="token_k1", rollout_rs_threshold="0.7_2.0")
    model, reference = Model(weights_of(learner)), scale_reference(learner)
    kl = gaps(model, reference)
    drift = [[logprob(model, row, place) - SAMPLED[row][place] for place in places(row)] for row in range(4)]
    kept = [[0.5 <= np.exp(gap) <= 1 / 0.7 for gap in row] for row in drift]
    rewards = penalised(kl)
    table = [[sum(row[j:]) for j in range(len(row)) if kept[i][j]] for i, row in enumerate(rewards)]

    result = learner.update(trajectories(rollout))

    assert 0 < sum(map(sum, kept)) < sum(map(sum, MASKS))
    assert result.metrics["actor/reward_kl_penalty"] == pytest.approx(fmean(map(fmean, kl)), rel=1e-9)
    assert result.metrics["critic/returns/mean"] == pytest.approx(fmean(x for row in table for x in row), rel=1e-9)
    expected = [fmean(row) if row else 0.0 for row in whitened(table)]
    assert result.advantages == pytest.approx(expected, rel=1e-9)


def test_an_adaptive_coefficient_moves_after_its_update(saved_model: Path, rollout: Rollout):
    keys = {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_ctrl.kl_coef": COEF}
    adaptive = {"kl_ctrl.type": "adaptive", "kl_ctrl.target_kl": TARGET, "kl_ctrl.horizon": HORIZON}
    fixed, moving = new_learner(saved_model, keys), new_learner(saved_model, keys | adaptive)
    for learner in (fixed, moving):
        scale_reference(learner)

    expected, result = (learner.update(trajectories(rollout)) for learner in (fixed, moving))

    assert moving.reward_kl_coef != COEF
    assert (result.advantages, result.metrics) == (expected.advantages, expected.metrics)


def test_an_adaptive_coefficient_goes_on_where_a_checkpoint_left_it(
    saved_model: Path, rollout: Rollout, tmp_path: Path
):
    control = {"type": "adaptive", "kl_coef": COEF, "target_kl": TARGET, "horizon": HORIZON}
    keys = {"use_kl_in_reward": True, **{f"kl_ctrl.{key}": value for key, value in control.items()}}
    learner = new_learner(saved_model, keys)
    scale_reference(learner)
    kl = learner.update(trajectories(rollout)).metrics["actor/reward_kl_penalty"]
    moved = COEF * (1 + max(-0.2, min(0.2, kl / TARGET - 1)) * 4 / HORIZON)
    learner.save(tmp_path)

    resumed = new_learner(saved_model, keys)
    resumed.load(tmp_path)

    assert moved != COEF
    expected = learner.update(trajectories(rollout)).metrics
    assert expected["actor/reward_kl_penalty_coeff"] == pytest.approx(moved, rel=1e-12)
    assert resumed.update(trajectories(rollout)).metrics == expected
    for part, weights in weights_of(resumed).items():
        np.testing.assert_array_equal(weights, weights_of(learner)[part])


def test_a_fixed_coefficient_is_the_configurations_after_a_resume(saved_model: Path, rollout: Rollout, tmp_path: Path):
    new_learner(saved_model, {"use_kl_in_reward": True, "kl_ctrl.kl_coef": 0.5}).save(tmp_path)
    resumed = new_learner(saved_model, {"use_kl_in_reward": True, "kl_ctrl.kl_coef": 0.25})
    resumed.load(tmp_path)

    assert resumed.update(trajectories(rollout)).metrics["actor/reward_kl_penalty_coeff"] == 0.25
