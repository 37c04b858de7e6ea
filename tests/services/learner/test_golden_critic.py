"""Whole updates of a value model written out in numpy (see test_golden_update.py): GAE, clipping, AdamW.

Two mini-batches and two epochs make four steps, in which values leave the clip range and the norm is clipped.
"""

import math
import shutil
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.services.learner.test_golden_estimators import Table, new_learner, places, saved_model, whitened
from tests.services.learner.test_golden_update import (
    BETA1,
    BETA2,
    CLIP_NORM,
    DECAY,
    IDS,
    MASKS,
    SCORES,
    TEMPERATURE,
    Array,
    Model,
    Rollout,
    norm_in_float64,
    trajectories,
)
from trackway.learner.critic import BIAS, WEIGHT
from trackway.learner.learner import Learner

pytestmark = pytest.mark.slow

__all__ = ["saved_model"]

GAMMA, LAM, CLIP, LR = 0.9, 0.8, 0.25, 0.05
HEAD = [[0.75, -0.5, 0.25, 1.0]]
KEYS = {
    **{"critic.optim.lr": LR * 2, "critic.optim.lr_warmup_steps": 2, "critic.optim.betas": [BETA1, BETA2]},
    **{"critic.optim.weight_decay": DECAY, "critic.grad_clip": CLIP_NORM, "critic.cliprange_value": CLIP},
    **{"critic.ppo_mini_batch_size": 2, "critic.ppo_epochs": 2, "critic.ppo_micro_batch_size_per_gpu": 1},
}


@pytest.fixture(scope="module")
def value_folder(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's model with a head of its own, as a model for token classification is saved."""
    folder = tmp_path_factory.mktemp("value") / "model"
    shutil.copytree(saved_model, folder)
    head = {WEIGHT: torch.tensor(HEAD), BIAS: torch.tensor([0.125])}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", {"format": "pt"})
    return folder


def critic_weights(learner: Learner) -> dict[str, Array]:
    assert learner.critic is not None
    names = {
        **{"model.embed_tokens.weight": "E", "model.norm.weight": "g"},
        **{"lm_head.weight": "W", "lm_head.bias": "b"},
    }
    parameters = learner.critic.model.model.named_parameters()
    return {names[name]: parameter.detach().numpy().copy() for name, parameter in parameters}


def value(model: Model, row: int, place: int) -> float:
    """Of what has been written before the token at this place of the response."""
    return float(model.weights["W"][0] @ model.forward(IDS[row][place + 1])[1] + model.weights["b"][0])


def value_table(model: Model) -> Table:
    return [[value(model, row, place) for place in places(row)] for row in range(4)]


def advantages_of(values: Table) -> Table:
    """Before whitening."""
    result: Table = []
    for row, own in enumerate(values):
        after, found = 0.0, list[float]()
        for place in reversed(range(len(own))):
            is_last = place == len(own) - 1
            error = SCORES[row] - own[place] if is_last else GAMMA * own[place + 1] - own[place]
            after = error + GAMMA * LAM * after
            found.insert(0, after)
        result.append(found)
    return result


def step(model: Model, rows: list[int], old: Table, returns: Table) -> tuple[float, float, float, float]:
    """One step on these rows: loss, share of clipped tokens, mean value and norm; changes the model."""
    gradient = {name: np.zeros_like(weight) for name, weight in model.weights.items()}
    tokens, loss, clipped_count, total = sum(sum(MASKS[row]) for row in rows), 0.0, 0, 0.0
    for row in rows:
        for place, before, target in zip(places(row), old[row], returns[row], strict=True):
            predicted = value(model, row, place)
            clipped = min(max(predicted, before - CLIP), before + CLIP)
            own, bounded = (predicted - target) ** 2, (clipped - target) ** 2
            loss += max(own, bounded) / 2 / tokens
            total += predicted / tokens
            clipped_count += bounded > own
            slope = 0.0 if bounded > own else (predicted - target) / tokens
            gradient["b"] += slope
            # Its vocabulary is one number, without a temperature.
            model.backward(IDS[row][place + 1], np.array([slope * TEMPERATURE]), gradient)
    norm = model.adamw(gradient)
    return loss, clipped_count / tokens, total, norm


def test_four_steps_of_a_value_model_are_those_written_out(saved_model: Path, value_folder: Path, rollout: Rollout):
    algorithm = {"adv_estimator": "gae", "gamma": GAMMA, "lam": LAM}
    learner = new_learner(saved_model, algorithm, **KEYS, **{"critic.model.path": str(value_folder)})
    assert learner.critic is not None
    norm_in_float64(learner.critic.model)
    model = Model(critic_weights(learner), learning_rate=LR)
    np.testing.assert_array_equal(model.weights["W"], HEAD)
    old = value_table(model)
    raw = advantages_of(old)
    returns = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(raw, old, strict=True)]
    steps = [step(model, rows, old, returns) for rows in ([0, 1], [2, 3], [0, 1], [2, 3])]
    losses, clipped, means, norms = zip(*steps, strict=True)

    result = learner.update(trajectories(rollout))

    assert max(clipped) > 0
    assert min(norms) > CLIP_NORM
    for part, weights in critic_weights(learner).items():
        np.testing.assert_allclose(weights, model.weights[part], rtol=0, atol=1e-11)
    flat, flat_values, flat_returns = ([x for row in table for x in row] for table in (raw, old, returns))
    explained = 1 - stdev(flat) ** 2 / (stdev(flat_returns) ** 2 + 1e-5)
    expected = {
        **{"critic/vf_loss": fmean(losses), "critic/vf_clipfrac": fmean(clipped), "critic/vpred_mean": fmean(means)},
        **{"critic/grad_norm": fmean(norms), "critic/lr": LR, "critic/skipped_steps": 0.0},
        **{"critic/values/mean": fmean(flat_values), "critic/values/max": max(flat_values)},
        **{"critic/values/min": min(flat_values), "critic/vf_explained_var": explained},
        **{"critic/returns/mean": fmean(flat_returns), "critic/returns/max": max(flat_returns)},
    }
    assert {name: result.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert result.advantages == pytest.approx([fmean(row) for row in whitened(raw)], rel=1e-9)
    assert math.isfinite(result.metrics["actor/pg_loss"])
