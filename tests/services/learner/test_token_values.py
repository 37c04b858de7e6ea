"""What an update reports of each token, against the model written out."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.learner.test_learner import ragged
from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.learner import Learner
from trackway.wire.trajectory import Trajectory

Rollout = Callable[..., Trajectory]
ON = {"trackway.save_token_values": True, "dtype": "float64"}


def expected(tiny_model: Path, trajectories: list[Trajectory]) -> tuple[list[float], list[float]]:
    """Log-probability and entropy of each response token under the model, NaN for those of tools."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    logprobs, entropies = [], []
    for trajectory in trajectories:
        ids = trajectory.prompt_ids + trajectory.response_ids
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        for place, by_model in enumerate(trajectory.response_mask, start=len(trajectory.prompt_ids)):
            logprobs.append(float(logp[place - 1, ids[place]]) if by_model else math.nan)
            entropies.append(float(-(logp[place - 1].exp() * logp[place - 1]).sum()) if by_model else math.nan)
    return logprobs, entropies


@pytest.mark.parametrize("bypass_mode", [False, True], ids=["recomputed", "bypass"])
def test_each_token_has_the_learners_numbers(tiny_model: Path, rollout: Rollout, bypass_mode: bool) -> None:
    trajectories = ragged(rollout)
    learner = Learner(learner_config(tiny_model, micro_batch_size=3, bypass_mode=bypass_mode, ppo_epochs=2, **ON))

    result = learner.update(trajectories)

    tokens = result.tokens
    assert tokens is not None and tokens.lengths == [len(t.response_ids) for t in trajectories]
    logprobs, entropies = expected(tiny_model, trajectories)
    mask = [bool(by_model) for t in trajectories for by_model in t.response_mask]
    advantages = [
        advantage if by_model else math.nan
        for t, advantage in zip(trajectories, result.advantages, strict=True)
        for by_model in t.response_mask
    ]
    assert tokens.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5, nan_ok=True)
    assert tokens.entropies.tolist() == pytest.approx(entropies, abs=1e-5, nan_ok=True)
    assert tokens.advantages.tolist() == pytest.approx(advantages, abs=1e-6, nan_ok=True)
    assert tokens.kept.tolist() == mask
    if bypass_mode:  # the first epoch's ratio is that to the sampler; the second may add some
        sampled = [value for t in trajectories for value in t.response_logprobs]
        ratios = [math.exp(now - before) for now, before in zip(logprobs, sampled, strict=True)]
        beyond = [
            by_model and ((advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8))
            for by_model, advantage, ratio in zip(mask, advantages, ratios, strict=True)
        ]
        assert sum(beyond) > 3 and all(
            seen or not due for seen, due in zip(tokens.clipped.tolist(), beyond, strict=True)
        )


@pytest.mark.parametrize("bypass_mode", [False, True], ids=["recomputed", "bypass"])
def test_a_rejected_token_is_not_kept(tiny_model: Path, rollout: Rollout, bypass_mode: bool) -> None:
    trajectories = ragged(rollout)
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.05_20.0", "bypass_mode": bypass_mode}

    tokens = Learner(learner_config(tiny_model, **rejection, **ON)).update(trajectories).tokens

    assert tokens is not None
    logprobs, _ = expected(tiny_model, trajectories)
    sampled = [value for t in trajectories for value in t.response_logprobs]
    within = [0.05 <= math.exp(now - before) <= 20.0 for now, before in zip(logprobs, sampled, strict=True)]
    assert tokens.kept.tolist() == within and 3 < sum(within) < sum(not math.isnan(value) for value in logprobs) - 3
    assert tokens.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5, nan_ok=True)
    assert [math.isnan(value) for value in tokens.entropies.tolist()] == [not kept for kept in within]


def test_the_values_are_asked_for_and_change_nothing(tiny_model: Path, rollout: Rollout) -> None:
    trajectories = ragged(rollout)
    with_values = Learner(learner_config(tiny_model, mini_batch_size=5, **ON))
    without = Learner(learner_config(tiny_model, mini_batch_size=5, dtype="float64"))

    first, second = with_values.update(trajectories), without.update(trajectories)

    assert second.tokens is None
    assert (first.metrics, logprobs_of(with_values)) == (second.metrics, logprobs_of(without))
