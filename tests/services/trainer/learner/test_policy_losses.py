"""Each policy loss, its gradient and its statistics against a loop over tokens in plain Python."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import get_args

import pytest
import torch

from tests.services.trainer.learner.test_off_policy_update import sampled, weights
from tests.services.trainer.learner_settings import learner_config
from trackway.trainer.config import resolve
from trackway.trainer.config.policy import PolicyLossConfig
from trackway.trainer.learner.algorithm import Aggregation
from trackway.trainer.learner.learner import Learner
from trackway.trainer.learner.policy_losses import POLICY_LOSSES, LossInputs
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

Rollout = Callable[..., Trajectory]

LOW, HIGH, BETA, TAU_POS, TAU_NEG = 0.2, 0.3, 0.4, 1.5, 2.5
MASK = [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]]
LOGP = [[-1.0, -0.5, 9.0, -2.0], [7.0, -0.25, -1.5, 3.0], [-0.75, 5.0, 1.0, -3.0]]
OLD = [[-1.1, -0.4, 1.0, -2.5], [2.0, -0.5, -0.25, 8.0], [-0.875, 1.0, 4.0, -4.0]]
"""Log ratios 0.1, -0.1, 0.5 | 0.25, -1.25 | 0.125, 1; what the mask hides is absurd on purpose."""
A = [0.5, -2.0, 1.5]
WEIGHTS = [[0.5, 2.0, 3.0, 1.5], [9.0, 0.25, 1.25, 9.0], [0.75, 9.0, 9.0, 1.0]]

Token = tuple[float, float, float]
"""The loss of a token, its derivative by the token's logprob, and whether it is clipped."""


def ppo_like(advantage: float, ratio: float) -> Token:
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    plain, clipped = -advantage * ratio, -advantage * bounded
    return (clipped, 0.0, 1.0) if clipped > plain else (plain, plain, 0.0)


def gspo(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    return [ppo_like(a, math.exp(fmean(logs))) for _ in logs]


def sapo(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    tau = TAU_POS if a > 0 else TAU_NEG
    gates = [1 / (1 + math.exp(-tau * (math.exp(d) - 1))) for d in logs]
    return [(-a * 4 / tau * g, -a * 4 * g * (1 - g) * math.exp(d), 0.0) for g, d in zip(gates, logs, strict=True)]


def cispo(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    factors = [min(max(math.exp(d), 1 - LOW), 1 + HIGH) for d in logs]
    pairs = zip(factors, logp, logs, strict=True)
    return [(-f * a * p, -f * a, float(not 1 - LOW <= math.exp(d) <= 1 + HIGH)) for f, p, d in pairs]


def gpg(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    return [(-a * p, -a, 0.0) for p in logp]


def dro(a: float, logs: list[float], logp: list[float]) -> list[Token]:
    return [(-(a * p - BETA / 2 * d**2), -(a - BETA * d), 0.0) for p, d in zip(logp, logs, strict=True)]


def rows() -> list[tuple[float, list[float], list[float], list[float], list[int]]]:
    """Of each trajectory: advantage, log ratios, logprobs and weights of its model tokens, and their columns."""
    result = []
    for row in range(3):
        columns = [t for t in range(4) if MASK[row][t]]
        logs = [LOGP[row][t] - OLD[row][t] for t in columns]
        result.append((A[row], logs, [LOGP[row][t] for t in columns], [WEIGHTS[row][t] for t in columns], columns))
    return result


def computed(mode: str, agg_mode: str, *, weighted: bool) -> tuple[float, list[list[float]], dict[str, float]]:
    config = learner_config(
        "m",
        **{"bypass_mode": False, "loss_mode": mode, "dro_beta": BETA, "tau_pos": TAU_POS, "tau_neg": TAU_NEG},
        **{"clip_ratio_low": LOW, "clip_ratio_high": HIGH},
    )
    mask = torch.tensor(MASK, dtype=torch.bool)
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logp,
        torch.tensor(OLD, dtype=torch.float64),
        torch.tensor(A, dtype=torch.float64).unsqueeze(-1),
        mask,
        Aggregation.over(mask, agg_mode),
        torch.tensor(WEIGHTS, dtype=torch.float64) if weighted else None,
    )
    loss, stats = POLICY_LOSSES[mode](config, inputs)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert not any(value.requires_grad for value in stats.values())
    return float(loss.detach()), gradient.tolist(), {name: float(value) for name, value in stats.items()}


def nested(values: list[list[float]]) -> list[object]:
    return [pytest.approx(row, rel=1e-12, abs=1e-15) for row in values]


KL = -fmean(d for _, logs, *_ in rows() for d in logs)
BY_TOKEN = {"gspo": gspo, "sapo": sapo, "cispo": cispo, "gpg": gpg, "dro": dro}
PER_SEQUENCE = ("gspo", "sapo")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("mode", BY_TOKEN)
def test_a_loss_of_tokens_and_its_gradient(mode: str, agg_mode: str, weighted: bool):
    loss, gradient, stats = computed(mode, agg_mode, weighted=weighted)

    expected, slopes, clipped = 0.0, [[0.0] * 4 for _ in MASK], []
    for row, (a, logs, logp, factors, columns) in enumerate(rows()):
        share = 1 / 7 if agg_mode == "token-mean" else 1 / 3
        share = 1 / 3 / len(logs) if mode in PER_SEQUENCE else share
        for (value, slope, clip), factor, column in zip(BY_TOKEN[mode](a, logs, logp), factors, columns, strict=True):
            scale = share * (factor if weighted else 1.0)
            expected += scale * value
            slopes[row][column] = scale * slope
            clipped.append(clip)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient == nested(slopes)
    assert stats["ppo_kl"] == pytest.approx(KL)
    assert stats.get("pg_clipfrac", 0.0) == pytest.approx(fmean(clipped))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-sum"])
def test_the_geometric_mean_is_over_sequences_whatever_the_aggregation(agg_mode: str, weighted: bool):
    loss, gradient, stats = computed("geo_mean", agg_mode, weighted=weighted)

    expected, slopes = 0.0, [[0.0] * 4 for _ in MASK]
    above, below = [], []
    for row, (a, logs, _, factors, columns) in enumerate(rows()):
        bounded = [min(d, HIGH) if a > 0 else max(d, -LOW) for d in logs]
        weight = math.exp(fmean(map(math.log, factors))) if weighted else 1.0
        value = -a * math.exp(fmean(bounded)) * weight / 3
        expected += value
        for d, kept, column in zip(logs, bounded, columns, strict=True):
            slopes[row][column] = value / len(logs) if d == kept else 0.0
            outside = not -LOW <= d <= HIGH
            above.append(outside and a > 0)
            below.append(outside and a < 0)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert gradient == [pytest.approx(row, rel=1e-9, abs=1e-15) for row in slopes]
    assert stats == pytest.approx(
        {"pg_clipfrac": fmean(above), "pg_clipfrac_lower": fmean(below), "ppo_kl": KL}, rel=1e-12
    )


def test_the_sequence_ratio_of_gspo_is_clamped_at_exp_10():
    config = learner_config("m", bypass_mode=False, loss_mode="gspo")
    mask, zeros = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    inputs = LossInputs(zeros + 50, zeros, torch.tensor([[-1.0]]), mask, Aggregation.over(mask, "token-mean"), None)

    loss, _ = POLICY_LOSSES["gspo"](config, inputs)

    assert float(loss) == pytest.approx(math.exp(10))


def test_every_name_of_the_key_has_a_loss():
    assert tuple(POLICY_LOSSES) == get_args(PolicyLossConfig.model_fields["loss_mode"].annotation)


@pytest.mark.parametrize("mode", POLICY_LOSSES)
def test_an_update_does_not_depend_on_the_micro_batch_size(tiny_model: Path, rollout: Rollout, mode: str):
    outcomes = []
    for size in (1, 6):
        keys = {"loss_mode": mode, "dro_beta": BETA, "rollout_is": "token", "bypass_mode": False, "lr": 1e-3}
        learner = Learner(learner_config(tiny_model, dtype="float64", micro_batch_size=size, **keys))
        metrics = learner.update(sampled(rollout)).metrics
        outcomes.append((metrics["actor/pg_loss"], weights(learner)))

    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-9)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "dro"}, "dro_beta: expected a positive number with loss_mo"),
        (
            {
                "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
                "algorithm.rollout_correction.bypass_mode": True,
            },
            "loss_mode: expected vanilla with algorithm.rollout_correction.bypass_mode=true, where loss_type is",
        ),
    ],
)
def test_a_loss_that_would_not_be_what_is_trained_is_refused(keys: dict[str, str | bool], problem: str):
    with pytest.raises(TrackwayError) as caught:
        resolve({**keys})

    assert problem in caught.value.message
