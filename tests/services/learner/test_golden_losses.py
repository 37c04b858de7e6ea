"""Whole updates with each policy loss against numpy: three steps, of which the first has the ratio 1."""

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from tests.services.learner.test_golden_estimators import TOKENS, Table, new_learner, places, saved_model
from tests.services.learner.test_golden_update import (
    ADVANTAGES,
    IDS,
    SAMPLED,
    VOCABULARY,
    Model,
    Rollout,
    logprob,
    trajectories,
    weights_of,
)
from tests.services.learner.test_policy_losses import (
    BETA,
    BY_TOKEN,
    DUAL,
    HIGH,
    KL_COEF,
    LOW,
    PER_SEQUENCE,
    RANGE,
    TAU_NEG,
    TAU_POS,
    Token,
    ppo_like,
)
from trackway.learner.policy_losses import POLICY_LOSSES

pytestmark = pytest.mark.slow

__all__ = ["saved_model"]

ALL = sum(TOKENS)
KEYS = {"dro_beta": BETA, "tau_pos": TAU_POS, "tau_neg": TAU_NEG, "clip_ratio_c": DUAL, "ppo_kl_coef": KL_COEF}
SELECTING = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.3}


def selected(mode: str, logs: Table, logp: Table) -> list[list[bool]]:
    """What clip_cov and kl_cov select: all unclipped tokens of positive covariance, and the two of the highest."""
    of_tokens = [a for a, n in zip(ADVANTAGES, TOKENS, strict=True) for _ in range(n)]
    mean_a, mean_p = fmean(of_tokens), fmean(p for row in logp for p in row)
    covariances = [[(a - mean_a) * (p - mean_p) for p in row] for a, row in zip(ADVANTAGES, logp, strict=True)]
    if mode == "kl_cov":
        highest = sorted((value for row in covariances for value in row), reverse=True)[: int(0.3 * ALL)]
        return [[value in highest for value in row] for row in covariances]
    clipped = [[ppo_like(a, math.exp(d))[2] for d in row] for a, row in zip(ADVANTAGES, logs, strict=True)]
    return [
        [c > 0 and not cut for c, cut in zip(*rows, strict=True)] for rows in zip(covariances, clipped, strict=True)
    ]


def tokens_of(mode: str, row: int, logs: list[float], logp: list[float], chosen: list[bool]) -> list[Token]:
    """Loss, slope and clipping of each token of a row."""
    a = ADVANTAGES[row]
    if mode in BY_TOKEN:
        return BY_TOKEN[mode](a, logs, logp)
    if mode == "kl_cov":
        pairs = zip(logs, chosen, strict=True)
        return [
            (-a * math.exp(d) + KL_COEF * abs(d) * c, -a * math.exp(d) + KL_COEF * np.sign(d) * c, 0) for d, c in pairs
        ]
    if mode == "clip_cov":
        return [(0.0, 0.0, 0.0) if c else ppo_like(a, math.exp(d)) for d, c in zip(logs, chosen, strict=True)]
    if mode == "geo_mean":
        bounded = [min(d, HIGH) if a > 0 else max(d, -LOW) for d in logs]
        value = -a * math.exp(fmean(bounded))
        return [(value, value if d == kept else 0.0, 0.0) for d, kept in zip(logs, bounded, strict=True)]
    dual = [a < 0 and math.exp(d) > DUAL for d in logs]
    return [(-a * DUAL, 0.0, 0.0) if cut else ppo_like(a, math.exp(d)) for d, cut in zip(logs, dual, strict=True)]


def steps(model: Model, mode: str, count: int) -> list[float]:
    """The losses of so many steps on all four rows; changes the model."""
    start, losses = Model(dict(model.weights)), []
    for _ in range(count):
        logp = [[logprob(model, row, place) for place in places(row)] for row in range(4)]
        old = SAMPLED_TOKENS if mode == "bypass_mode" else table_of(start)
        logs = [[now - then for now, then in zip(*rows, strict=True)] for rows in zip(logp, old, strict=True)]
        chosen = selected(mode, logs, logp)
        gradient, loss = {name: np.zeros_like(weight) for name, weight in model.weights.items()}, 0.0
        for row in range(4):
            share = 1 / 4 / TOKENS[row] if mode in (*PER_SEQUENCE, "geo_mean") else 1 / ALL
            tokens = tokens_of(mode, row, logs[row], logp[row], chosen[row])
            for place, (value, slope, _) in zip(places(row), tokens, strict=True):
                token, target = IDS[row][place + 1], IDS[row][place + 2]
                probs = np.exp(model.forward(token)[0])
                loss += share * value
                model.backward(token, share * slope * (np.eye(VOCABULARY)[target] - probs), gradient)
        losses.append(loss)
        model.adamw(gradient)
    return losses


def table_of(model: Model) -> Table:
    return [[logprob(model, row, place) for place in places(row)] for row in range(4)]


SAMPLED_TOKENS = [[SAMPLED[row][place] for place in places(row)] for row in range(4)]


@pytest.mark.parametrize("mode", POLICY_LOSSES)
def test_three_steps_with_a_loss_are_those_written_out(saved_model: Path, rollout: Rollout, mode: str):
    low, high = RANGE.get(mode, (LOW, HIGH))
    settings = {**KEYS, **SELECTING, "loss_mode": mode, "bypass_mode": mode == "bypass_mode"}
    learner = new_learner(saved_model, {}, **settings, clip_ratio_low=low, clip_ratio_high=high, ppo_epochs=3, lr=0.1)
    model = Model(weights_of(learner), learning_rate=0.1)
    losses = steps(model, mode, 3)

    metrics = learner.update(trajectories(rollout)).metrics

    for part, weights in weights_of(learner).items():
        np.testing.assert_allclose(weights, model.weights[part], rtol=0, atol=1e-10)
    assert metrics["actor/pg_loss"] == pytest.approx(fmean(losses), rel=1e-8)
