"""Whole updates with each estimator, and with the KL in the reward, against numpy (see test_golden_update.py).

Two steps on the same four trajectories: in the first the ratio is 1, in the second it has left 1.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from tests.services.learner.test_golden_update import (
    ADVANTAGES,
    BETA1,
    BETA2,
    CLIP_NORM,
    DECAY,
    DUAL,
    HIGH,
    IDS,
    LOW,
    LR,
    MASKS,
    SAMPLED,
    SCORES,
    TEMPERATURE,
    VOCABULARY,
    Model,
    Rollout,
    logprob,
    norm_in_float64,
    policy_term,
    save_model,
    trajectories,
    weights_of,
)
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.advantages import ESTIMATORS
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.trainer.loop.rollout_client import sampled_of, with_baseline

pytestmark = pytest.mark.slow

Table = list[list[float]]
"""By row and model token of the row."""

GREEDY = [0.25, 1.0]
"""Scores of the greedy rollouts of the two groups, for remax."""
CENTRED = [0.5, -0.5, -0.25, 0.25]
TOKENS = [sum(mask) for mask in MASKS]
PAIRS = [(0, 1), (2, 3)]
"""The rows of the two groups."""
GAMMA, LAM = 0.5, 0.75


def on_tokens(values: list[float]) -> Table:
    return [[value] * tokens for value, tokens in zip(values, TOKENS, strict=True)]


def whitened(table: Table) -> Table:
    flat = [value for row in table for value in row]
    scale = math.sqrt(stdev(flat) ** 2 + 1e-8)
    return [[(value - fmean(flat)) / scale for value in row] for row in table]


def scaled(by: float, values: list[float]) -> list[float]:
    return [by * value for value in values]


def places(row: int) -> list[int]:
    return [place for place, by_model in enumerate(MASKS[row]) if by_model]


def optimal(model: Model, *, packed: bool) -> Table:
    """The optimal token baseline from the policy before the update."""
    variance: dict[tuple[int, int], float] = {}
    for row in range(4):
        total = 0.0
        for count, place in enumerate(places(row)):
            probs = np.exp(model.forward(IDS[row][place + 1])[0])
            total += 1 - 2 * float(probs[IDS[row][place + 2]]) + float((probs**2).sum())
            variance[row, count if packed else place] = total
    result: Table = []
    for row in range(4):
        other = row + 1 if row % 2 == 0 else row - 1
        own, others = (sorted(place for r, place in variance if r == which) for which in (row, other))
        advantages = []
        for place in own:
            w, v = variance[row, place], variance.get((other, place), 0.0)
            baseline = (w * SCORES[row] + v * SCORES[other]) / (w + v + 1e-8)
            advantages.append(SCORES[row] - (0.0 if place > others[-1] else baseline))
        result.append(advantages)
    return result


def to_go(gamma: float) -> Table:
    return [[s * gamma**left for left in reversed(range(n))] for s, n in zip(SCORES, TOKENS, strict=True)]


# Group 0 has the scores 1 and 0 on 2 and 2 tokens, group 1 has 1/4 and 3/4 on 3 and 1; 3 of 4 are not zero.
EXPECTED: dict[str, Callable[[Model], Table]] = {
    "grpo": lambda _: on_tokens(ADVANTAGES),
    "grpo_vectorized": lambda _: on_tokens(ADVANTAGES),
    "grpo_passk": lambda _: on_tokens([1 / (math.sqrt(0.5) + 1e-6), 0, 0, 0.5 / (math.sqrt(0.125) + 1e-6)]),
    "gae": lambda _: whitened(to_go(GAMMA * LAM)),  # of a new value model, whose values are 0
    "rloo": lambda _: on_tokens(scaled(2, CENTRED)),
    "rloo_vectorized": lambda _: on_tokens(scaled(2, CENTRED)),
    "opo": lambda _: on_tokens([0.5, -0.5, -0.125, 0.375]),
    "gpg": lambda _: on_tokens(scaled(4 / 3, CENTRED)),
    "gdpo": lambda _: whitened(on_tokens(ADVANTAGES)),
    "reinforce_plus_plus": lambda _: whitened(to_go(GAMMA)),
    "reinforce_plus_plus_baseline": lambda _: whitened(on_tokens(CENTRED)),
    "remax": lambda _: on_tokens([0.75, -0.25, -0.75, -0.25]),
    "optimal_token_baseline": lambda model: optimal(model, packed=False),
    "tir_optimal_token_baseline": lambda model: optimal(model, packed=True),
}

RETURNS: dict[str, Table] = {
    "gae": to_go(GAMMA * LAM),
    "reinforce_plus_plus": to_go(GAMMA),
    "remax": to_go(1.0),
    "optimal_token_baseline": to_go(1.0),
    "tir_optimal_token_baseline": to_go(1.0),
}
"""verl's returns; of the other estimators they are the advantages."""


def steps(model: Model, table: Table, count: int = 2) -> list[float]:
    """The losses of so many steps on all four rows, with these advantages; changes the model."""
    start = Model(dict(model.weights))
    losses = []
    for _ in range(count):
        gradient, loss = {name: np.zeros_like(weight) for name, weight in model.weights.items()}, 0.0
        for row, values in enumerate(table):
            for place, advantage in zip(places(row), values, strict=True):
                token, target = IDS[row][place + 1], IDS[row][place + 2]
                logp = model.forward(token)[0]
                ratio = math.exp(float(logp[target]) - logprob(start, row, place))
                value, slope = policy_term(advantage, ratio)
                loss += value / sum(TOKENS)
                by_logits = slope / sum(TOKENS) * (np.eye(VOCABULARY)[target] - np.exp(logp))
                model.backward(token, by_logits, gradient)
        losses.append(loss)
        model.adamw(gradient)
    return losses


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def new_learner(folder: Path, algorithm: dict[str, object], **settings: object) -> Learner:
    ours = {
        **{"dtype": "float64", "lr": LR, "betas": (BETA1, BETA2), "weight_decay": DECAY, "clip_grad": CLIP_NORM},
        **{"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL, "temperature": TEMPERATURE},
        **{"mini_batch_size": 4, "micro_batch_size": 2, "ppo_epochs": 2, "bypass_mode": False},
    }
    config = learner_config(
        folder, **ours | settings, **{f"algorithm.{key}": value for key, value in algorithm.items()}
    )
    learner = Learner(config)
    for policy in (learner.policy, learner.reference):
        if isinstance(policy, Policy):
            norm_in_float64(policy)
    return learner


def test_every_estimator_has_a_golden_update():
    assert EXPECTED.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_two_steps_with_an_estimator_are_those_written_out(saved_model: Path, rollout: Rollout, name: str):
    algorithm = {"adv_estimator": name, "gamma": GAMMA, "lam": LAM, "gdpo_reward_keys": ["score"]}
    settings = {"actor_rollout_ref.rollout.n": 2} if name == "grpo_passk" else {}
    learner = new_learner(saved_model, algorithm, **settings)
    model = Model(weights_of(learner))
    table = EXPECTED[name](model)
    losses = steps(model, table)

    made = trajectories(rollout)
    groups = [with_baseline(made[2 * i : 2 * i + 2], rollout(score=score)) for i, score in enumerate(GREEDY)]
    result = learner.update(sampled_of([trajectory for group in groups for trajectory in group]))

    for part, weights in weights_of(learner).items():
        np.testing.assert_allclose(weights, model.weights[part], rtol=0, atol=1e-11)
    assert result.metrics["actor/pg_loss"] == pytest.approx(fmean(losses), rel=1e-9)
    assert result.advantages == pytest.approx([fmean(row) for row in table], rel=1e-9)
    flat = [value for row in table for value in row]
    assert result.metrics["critic/advantages/mean"] == pytest.approx(fmean(flat), rel=1e-9, abs=1e-12)
    assert result.metrics["critic/advantages/max"] == pytest.approx(max(flat), rel=1e-9)
    returns = [value for row in RETURNS.get(name, table) for value in row]
    assert result.metrics["critic/returns/mean"] == pytest.approx(fmean(returns), rel=1e-9, abs=1e-12)
    assert result.metrics["critic/returns/max"] == pytest.approx(max(returns), rel=1e-9)


@pytest.mark.parametrize("name", ["opo", "reinforce_plus_plus"])
def test_advantages_are_those_of_kept_tokens(saved_model: Path, rollout: Rollout, name: str):
    keys = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_2.0"}
    learner = new_learner(saved_model, {"adv_estimator": name, "gamma": GAMMA}, **keys)
    model = Model(weights_of(learner))
    ratios = [[math.exp(logprob(model, row, j) - SAMPLED[row][j]) for j in places(row)] for row in range(4)]
    kept = [[0.5 <= ratio <= 1 / 0.7 for ratio in row] for row in ratios]
    lengths = [sum(row) for row in kept]
    if name == "opo":
        weighted = [SCORES[row] * lengths[row] for row in range(4)]
        means = [(weighted[a] + weighted[b]) / max(1, lengths[a] + lengths[b]) for a, b in PAIRS]
        expected = [SCORES[row] - means[row // 2] for row in range(4)]
    else:  # a discount for each kept token that the score passes
        places_kept = [[j for j, is_kept in enumerate(row) if is_kept] for row in kept]
        table = [[SCORES[i] * GAMMA ** sum(kept[i][j:-1]) for j in row] for i, row in enumerate(places_kept)]
        expected = [fmean(row) if row else 0.0 for row in whitened(table)]

    result = learner.update(trajectories(rollout))

    assert 0 < sum(lengths) < sum(TOKENS)
    assert result.metrics["training/trained_tokens"] == sum(lengths)
    assert result.advantages == pytest.approx(expected, rel=1e-9)


def test_a_distribution_that_is_measured_for_a_baseline_leaves_bypass_mode_its_ratio(
    saved_model: Path, rollout: Rollout
):
    learner = new_learner(saved_model, {"adv_estimator": "optimal_token_baseline"}, bypass_mode=True)
    expected = optimal(Model(weights_of(learner)), packed=False)

    metrics = learner.update(trajectories(rollout)).metrics

    assert metrics["critic/advantages/max"] == pytest.approx(max(map(max, expected)), rel=1e-9)
    assert metrics["training/rollout_logprob_diff_max"] > 0.1
