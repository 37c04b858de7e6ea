"""Whole updates of a model small enough to be written out: forward, derivatives and AdamW in numpy against the learner.

The model has no layers: the logits after token t are W (g * E_t / rms(E_t)). Two mini-batches and two epochs make four
steps, in which the ratio leaves 1, KL and entropy have gradients, and the norm is clipped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.services.trainer.learner_settings import learner_config
from tests.tiny_models import tiny_qwen3
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.wire.trajectory import Trajectory, WeightSpan

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
Array = NDArray[np.float64]

VOCABULARY, HIDDEN, NORM_EPS = 6, 4, 1e-6
LR, BETA1, BETA2, DECAY, ADAM_EPS, CLIP_NORM = 0.0125, 0.8, 0.95, 0.1, 1e-8, 0.05
LOW, HIGH, DUAL, TEMPERATURE, KL_COEF, ENTROPY_COEFF, SCALE = 0.2, 0.28, 3.0, 0.8, 0.1, 0.05, 7.0

IDS = [[0, 3, 1, 5, 2], [0, 3, 4, 4], [5, 1, 2, 0, 3, 4], [5, 1, 3, 3]]
"""Two tokens of prompt and then the response, for two groups of two."""
MASKS = [[1, 0, 1], [1, 1], [1, 1, 0, 1], [1, 0]]
SAMPLED = [[-2.0, 0.0, -1.2], [-1.7, -1.9], [-0.9, -2.4, 0.0, -1.5], [-1.1, 0.0]]
SCORES = [1.0, 0.0, 0.25, 0.75]
ADVANTAGES = [deviation / (math.sqrt(deviation**2 * 2) + 1e-6) for deviation in (0.5, -0.5, -0.25, 0.25)]
"""(score - mean) / (std + eps) of pairs: std is the root of twice the squared distance from the mean."""


@dataclass
class Model:
    """Embedding E [V, H], norm's gain g [H], head W [V, H], and AdamW's moments of each."""

    weights: dict[str, Array]
    first: dict[str, Array] = field(default_factory=dict)
    second: dict[str, Array] = field(default_factory=dict)
    steps: int = 0
    learning_rate: float = LR

    def forward(self, token: int) -> tuple[Array, Array, float]:
        """Tempered log-probabilities after a token, the normed state, and its root mean square before."""
        row = self.weights["E"][token]
        rms = math.sqrt(float(np.mean(row**2)) + NORM_EPS)
        state = self.weights["g"] * row / rms
        logits = self.weights["W"] @ state / TEMPERATURE
        return logits - np.log(np.exp(logits).sum()), state, rms

    def backward(self, token: int, by_logits: Array, gradient: dict[str, Array]) -> None:
        """Adds the gradient of a loss whose derivative by the tempered logits after `token` is given."""
        _, state, rms = self.forward(token)
        row, by_logits = self.weights["E"][token], by_logits / TEMPERATURE
        by_state = self.weights["W"].T @ by_logits
        gradient["W"] += np.outer(by_logits, state)
        gradient["g"] += by_state * row / rms
        by_normed = self.weights["g"] * by_state
        gradient["E"][token] += by_normed / rms - row * (by_normed @ row) / (HIDDEN * rms**3)

    def adamw(self, gradient: dict[str, Array]) -> float:
        """One step on the clipped gradient; gives its norm before."""
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in gradient.values()))
        self.steps += 1
        for name, grad in gradient.items():
            clipped = grad * min(1.0, CLIP_NORM / (norm + 1e-6))
            self.first[name] = BETA1 * self.first.get(name, 0.0) + (1 - BETA1) * clipped
            self.second[name] = BETA2 * self.second.get(name, 0.0) + (1 - BETA2) * clipped**2
            mean, square = self.first[name] / (1 - BETA1**self.steps), self.second[name] / (1 - BETA2**self.steps)
            self.weights[name] = self.weights[name] * (1 - self.learning_rate * DECAY) - self.learning_rate * mean / (
                np.sqrt(square) + ADAM_EPS
            )
        return norm


@dataclass
class Written:
    """What a mini-batch's loss is made of, and its gradient."""

    gradient: dict[str, Array]
    pg_loss: float = 0.0
    kl_loss: float = 0.0
    entropy: float = 0.0


def token_weight(mode: str, rows: list[int], row: int) -> float:
    tokens = sum(sum(MASKS[row]) for row in rows)
    return {
        "token-mean": 1 / tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / len(rows),
        "seq-mean-token-sum-norm": 1 / len(rows) / SCALE,
        "seq-mean-token-mean": 1 / len(rows) / sum(MASKS[row]),
    }[mode]


def policy_term(advantage: float, ratio: float) -> tuple[float, float]:
    """The clipped loss of a token and its derivative by the logprob."""
    if advantage > 0:
        return (-advantage * ratio, -advantage * ratio) if ratio <= 1 + HIGH else (-advantage * (1 + HIGH), 0.0)
    if 1 - LOW <= ratio <= DUAL:
        return -advantage * ratio, -advantage * ratio
    return -advantage * (DUAL if ratio > DUAL else 1 - LOW), 0.0


def kl_term(kind: str, logp: Array, ref: Array, target: int) -> tuple[float, Array]:
    """The KL of a token and its derivative by the logits."""
    gap, chosen = float(logp[target] - ref[target]), np.eye(VOCABULARY)[target] - np.exp(logp)
    if kind == "full":
        value = float(np.exp(logp) @ (logp - ref))
        return value, np.exp(logp) * (logp - ref - value)
    k3 = math.exp(-gap) + gap - 1
    return k3, chosen * (gap if kind == "low_var_kl+" else 1 - math.exp(-gap))


def written_out(model: Model, reference: Model, rows: list[int], mode: str, kind: str) -> Written:
    """Loss and gradient of a mini-batch, token by token."""
    result = Written({name: np.zeros_like(weight) for name, weight in model.weights.items()})
    for row in rows:
        for place, by_model in enumerate(MASKS[row]):
            token, target = IDS[row][place + 1], IDS[row][place + 2]
            logp, ref = model.forward(token)[0], reference.forward(token)[0]
            probs, weight = np.exp(logp), by_model * token_weight(mode, rows, row)
            pg, slope = policy_term(ADVANTAGES[row], math.exp(logp[target] - SAMPLED[row][place]))
            kl, kl_slope = kl_term(kind, logp, ref, target)
            entropy = -float(probs @ logp)
            result.pg_loss += weight * pg
            result.kl_loss += weight * kl
            result.entropy += weight * entropy
            by_logits = slope * (np.eye(VOCABULARY)[target] - probs) + KL_COEF * kl_slope
            by_logits += ENTROPY_COEFF * probs * (logp + entropy)
            model.backward(token, weight * by_logits, result.gradient)
    return result


def save_model(folder: Path) -> Path:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 0}
    return tiny_qwen3(folder, 3, **sizes, rms_norm_eps=NORM_EPS, tie_word_embeddings=False, initializer_range=0.7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path)


def norm_in_float64(policy: Policy) -> None:
    """transformers' own norm computes in float32, whatever the weights are."""
    body, exact = policy.model.get_decoder(), torch.nn.RMSNorm(HIDDEN, eps=NORM_EPS)
    exact.register_parameter("weight", dict(policy.model.named_parameters())["model.norm.weight"])
    body.register_module("norm", exact)


def weights_of(learner: Learner) -> dict[str, Array]:
    names = {"model.embed_tokens.weight": "E", "model.norm.weight": "g", "lm_head.weight": "W"}
    return {
        names[name]: parameter.detach().numpy().copy() for name, parameter in learner.policy.model.named_parameters()
    }


def trajectories(rollout: Rollout) -> list[Trajectory]:
    return [
        rollout(
            row // 2,
            row % 2,
            SCORES[row],
            prompt_ids=IDS[row][:2],
            response_ids=IDS[row][2:],
            response_mask=MASKS[row],
            response_logprobs=SAMPLED[row],
        )
        for row in range(4)
    ]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("token-mean", "low_var_kl"),
        ("token-sum", "low_var_kl"),
        ("seq-mean-token-sum", "low_var_kl+"),
        ("seq-mean-token-sum-norm", "full"),
        ("seq-mean-token-mean", "full"),
    ],
)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_four_adamw_steps_are_those_written_out(
    folder: Path, rollout: Rollout, mode: str, kind: str, micro_batch_size: int
):
    config = learner_config(
        folder,
        dtype="float64",
        lr=LR * 4,
        lr_warmup_steps=4,
        betas=(BETA1, BETA2),
        weight_decay=DECAY,
        clip_grad=CLIP_NORM,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        temperature=TEMPERATURE,
        entropy_coeff=ENTROPY_COEFF,
        use_kl_loss=True,
        kl_loss_coef=KL_COEF,
        kl_loss_type=kind,
        loss_agg_mode=mode,
        loss_scale_factor=SCALE,
        mini_batch_size=2,
        micro_batch_size=micro_batch_size,
        ppo_epochs=2,
    )
    learner = Learner(config)
    assert isinstance(learner.reference, Policy)
    for policy in (learner.policy, learner.reference):
        norm_in_float64(policy)
    model, reference = Model(weights_of(learner)), Model(weights_of(learner))
    steps, norms = [], []
    for rows in ([0, 1], [2, 3], [0, 1], [2, 3]):
        steps.append(written_out(model, reference, rows, mode, kind))
        norms.append(model.adamw(steps[-1].gradient))

    metrics = learner.update(trajectories(rollout)).metrics

    assert min(norms) > CLIP_NORM
    for name, weights in weights_of(learner).items():
        np.testing.assert_allclose(weights, model.weights[name], rtol=0, atol=1e-11)
    expected = {
        "actor/pg_loss": sum(step.pg_loss for step in steps) / 4,
        "actor/kl_loss": sum(step.kl_loss for step in steps) / 4,
        "actor/entropy": sum(step.entropy for step in steps) / 4,
        "actor/grad_norm": sum(norms) / 4,
        "actor/lr": LR,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-10)


VERSIONS = [[5, 5, 7], [6, 6], [7, 4, 4, 6], [7, 5]]
"""Weight version that sampled each token; the update starts from version 7."""


@dataclass
class Correction:
    """One choice of `rollout_correction`, written out: what it does to log ratios by row, model tokens only."""

    keys: dict[str, object]
    source: str
    """Where the old logprobs come from: recomputed, sampled or estimated."""
    weigh: Callable[[list[list[float]]], list[list[float]]] = lambda rows: [[1.0] * len(row) for row in rows]
    keep: Callable[[list[list[float]]], list[list[bool]]] = lambda rows: [[True] * len(row) for row in rows]
    reinforce: bool = False


def truncated(rows: list[list[float]], cap: float = 1.2) -> list[list[float]]:
    return [[min(math.exp(d), cap) for d in row] for row in rows]


def over_their_mean(rows: list[list[float]]) -> list[list[float]]:
    weights = truncated(rows)
    mean = fmean(weight for row in weights for weight in row)
    return [[weight / mean for weight in row] for row in weights]


CORRECTIONS = {
    "token weights": Correction({"rollout_is": "token", "rollout_is_threshold": 1.2}, "recomputed", truncated),
    "normalised token weights": Correction(
        {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
        "recomputed",
        over_their_mean,
    ),
    "sequence icepop": Correction(
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
        "recomputed",
        lambda rows: [[w if 0.5 <= (w := math.exp(sum(row))) <= 5 else 0.0] * len(row) for row in rows],
    ),
    "token rejection": Correction(
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_2.0"},
        "recomputed",
        keep=lambda rows: [[0.5 <= math.exp(d) <= 1 / 0.7 for d in row] for row in rows],
    ),
    "sequence rejection": Correction(
        {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 2.5},
        "recomputed",
        keep=lambda rows: [[max(d * d / 2 for d in row) <= 2.5] * len(row) for row in rows],
    ),
    "bypass, weights only reported": Correction({"bypass_mode": True, "rollout_is": "token"}, "sampled"),
    "bypass with rejection": Correction(
        {"bypass_mode": True, "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 2.5},
        "sampled",
        keep=lambda rows: [[max(d * d / 2 for d in row) <= 2.5] * len(row) for row in rows],
    ),
    "reinforce": Correction({"bypass_mode": True, "loss_type": "reinforce"}, "sampled", reinforce=True),
    "reinforce with normalised weights": Correction(
        {
            **{"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
            **{"rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
        },
        "sampled",
        over_their_mean,
        reinforce=True,
    ),
    "estimated": Correction({"proximal_logprobs": "loglinear"}, "estimated"),
    "estimated with weights": Correction(
        {"proximal_logprobs": "loglinear", "rollout_is": "token", "rollout_is_threshold": 1.2}, "estimated", truncated
    ),
    "estimated with normalised weights": Correction(
        {
            **{"proximal_logprobs": "loglinear", "rollout_is": "token"},
            **{"rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
        },
        "estimated",
        over_their_mean,
    ),
}


def by_token(rows: list[int], value: Callable[[int, int], float]) -> list[list[float]]:
    """The value of each model token of the rows, by row and place in the response."""
    return [[value(row, place) for place, by_model in enumerate(MASKS[row]) if by_model] for row in rows]


def logprob(model: Model, row: int, place: int) -> float:
    return float(model.forward(IDS[row][place + 1])[0][IDS[row][place + 2]])


def old_logprob(source: str, start: Model, model: Model, row: int, place: int) -> float:
    sampled = SAMPLED[row][place]
    if source == "recomputed":
        return logprob(start, row, place)
    behind = 7 - VERSIONS[row][place]
    share = behind / (behind + 1) if source == "estimated" else 0.0
    return sampled + share * (logprob(model, row, place) - sampled)


def corrected(correction: Correction, start: Model, model: Model, rows: list[int]) -> Written:
    """Loss and gradient of a mini-batch under a correction; token-mean, without entropy and KL."""
    is_fixed = correction.source == "recomputed"
    scope = [0, 1, 2, 3] if is_fixed else rows

    def log_ratio(row: int, place: int) -> float:
        is_sampled = correction.source == "sampled"
        now = logprob(model, row, place) if is_sampled else old_logprob(correction.source, start, model, row, place)
        return now - SAMPLED[row][place]

    ratios = by_token(scope, log_ratio)
    weights, kept = (iter(f(ratios)[scope.index(rows[0]) :]) for f in (correction.weigh, correction.keep))
    totals = (
        correction.keep(ratios)[scope.index(rows[0]) :][: len(rows)]
        if is_fixed
        else [[True] * sum(MASKS[r]) for r in rows]
    )
    tokens = sum(map(sum, totals))
    result = Written({name: np.zeros_like(weight) for name, weight in model.weights.items()})
    for row in rows:
        places = [place for place, by_model in enumerate(MASKS[row]) if by_model]
        for place, weight, keeps in zip(places, next(weights), next(kept), strict=True):
            token, target = IDS[row][place + 1], IDS[row][place + 2]
            logp = model.forward(token)[0]
            if correction.reinforce:
                pg, slope = -ADVANTAGES[row] * logp[target], -ADVANTAGES[row]
            else:
                old = old_logprob(correction.source, start, model, row, place)
                pg, slope = policy_term(ADVANTAGES[row], math.exp(logp[target] - old))
            factor = weight * keeps / tokens
            result.pg_loss += factor * pg
            model.backward(token, factor * slope * (np.eye(VOCABULARY)[target] - np.exp(logp)), result.gradient)
    return result


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_four_corrected_steps_are_those_written_out(folder: Path, rollout: Rollout, name: str, micro_batch_size: int):
    correction = CORRECTIONS[name]
    config = learner_config(
        folder,
        dtype="float64",
        lr=LR,
        betas=(BETA1, BETA2),
        weight_decay=DECAY,
        clip_grad=CLIP_NORM,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        temperature=TEMPERATURE,
        mini_batch_size=2,
        micro_batch_size=micro_batch_size,
        ppo_epochs=2,
        **{"bypass_mode": False, **correction.keys},
    )
    learner = Learner(config)
    norm_in_float64(learner.policy)
    model, start = Model(weights_of(learner)), Model(weights_of(learner))
    steps = []
    for rows in ([0, 1], [2, 3], [0, 1], [2, 3]):
        steps.append(corrected(correction, start, model, rows))
        model.adamw(steps[-1].gradient)
    batch = [
        trajectory.model_copy(
            update={"weight_versions": [WeightSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions)]}
        )
        for trajectory, versions in zip(trajectories(rollout), VERSIONS, strict=True)
    ]

    metrics = learner.update(batch, version=7).metrics

    for part, weights in weights_of(learner).items():
        np.testing.assert_allclose(weights, model.weights[part], rtol=0, atol=1e-11)
    assert metrics["actor/pg_loss"] == pytest.approx(sum(step.pg_loss for step in steps) / 4, rel=1e-9)
