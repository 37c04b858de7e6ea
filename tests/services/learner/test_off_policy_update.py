"""An update with off-policy correction: what it reports, what it does not depend on, and batches that it empties."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.services.trainer.learner_settings import learner_config
from trackway.learner import learner as learner_module
from trackway.learner.batch import TrainingBatch, token_versions
from trackway.learner.learner import Learner
from trackway.wire.trajectory import Trajectory, WeightSpan

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


def sampled(rollout: Rollout, groups: int = 2, n: int = 3) -> list[Trajectory]:
    """Trajectories of unequal length whose logprobs are far from the model's."""
    draw = random.Random(1)
    result = []
    for place in range(groups * n):
        mask = [1, *(draw.randint(0, 1) for _ in range(draw.randint(1, 9)))]
        made = rollout(
            place // n,
            place % n,
            float(place % 2),
            response_ids=[draw.randrange(64) for _ in mask],
            response_mask=mask,
            response_logprobs=[-draw.uniform(1, 5) * m for m in mask],
            weight_versions=[WeightSpan(version=draw.randint(2, 4), start=0, end=len(mask))],
        )
        result.append(made)
    return result


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.policy.model.parameters()])


ALL = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "token_k3", "rollout_rs_threshold": 1.0}
MODES = {
    "decoupled": {"bypass_mode": False, **ALL},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce", **ALL},
    "loglinear": {"bypass_mode": False, "proximal_logprobs": "loglinear", **ALL},
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_metrics_do_not_depend_on_the_micro_batch_size(tiny_model: Path, rollout: Rollout, mode: str):
    outcomes = []
    for size in (1, 4, 6):
        learner = Learner(learner_config(tiny_model, dtype="float64", micro_batch_size=size, **MODES[mode]))
        outcomes.append((learner.update(sampled(rollout), version=5).metrics, weights(learner)))

    (metrics, after), *others = outcomes
    for other_metrics, other_after in others:
        assert other_metrics == pytest.approx(metrics, rel=1e-9)
        torch.testing.assert_close(other_after, after, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "mode", [{"bypass_mode": False}, {"bypass_mode": True}, {"bypass_mode": False, "proximal_logprobs": "loglinear"}]
)
def test_divergences_are_reported_whatever_the_mode(tiny_model: Path, rollout: Rollout, mode: dict[str, object]):
    learner = Learner(learner_config(tiny_model, **mode))
    trajectories = sampled(rollout)
    logprobs = learner.log_probs(trajectories)

    metrics = learner.update(trajectories, version=2).metrics

    # Under version 2 nothing is estimated: the old logprobs of `loglinear` are the sampler's.
    pairs = zip(logprobs, trajectories, strict=True)
    gaps = [q - p for row, t in pairs for p, q, m in zip(row, t.response_logprobs, t.response_mask, strict=True) if m]
    kl = 0.0 if "proximal_logprobs" in mode else sum(gaps) / len(gaps)
    assert metrics["rollout_corr/kl"] == pytest.approx(kl, rel=1e-5, abs=1e-7)
    assert {name for name in metrics if name.startswith("rollout_corr/rollout_i")} == set()


@pytest.mark.parametrize("micro_batch_size", [1, 36])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_statistics_are_means_over_kept_tokens(
    tiny_model: Path, rollout: Rollout, loss_type: str, micro_batch_size: int
):
    """As verl's `masked_mean` under the mask of `compute_policy_loss_bypass_mode`."""
    keys = {"bypass_mode": True, "loss_type": loss_type, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.2_3.0"}
    learner = Learner(learner_config(tiny_model, micro_batch_size=micro_batch_size, clip_ratio_c=1.1, **keys))
    trajectories = sampled(rollout, groups=9, n=4)
    logprobs = learner.log_probs(trajectories)

    result = learner.update(trajectories)

    kept: list[tuple[float, float]] = []
    for advantage, trajectory, row in zip(result.advantages, trajectories, logprobs, strict=True):
        sampler = zip(row, trajectory.response_logprobs, trajectory.response_mask, strict=True)
        ratios = [math.exp(p - q) for p, q, mask in sampler if mask]
        kept += [(advantage, ratio) for ratio in ratios if 1 / 3 <= ratio <= 5]
    tokens = sum(sum(trajectory.response_mask) for trajectory in trajectories)
    assert 0 < len(kept) < tokens
    assert result.metrics["actor/ppo_kl"] == pytest.approx(fmean(-math.log(r) for _, r in kept), rel=1e-5)
    if loss_type == "ppo_clip":
        clipped = fmean((a > 0 and r > 1.2) or (a < 0 and r < 0.8) for a, r in kept)
        bounded = fmean(a < 0 and r > 1.1 for a, r in kept)
        assert clipped > 0
        assert bounded > 0
        assert result.metrics["actor/pg_clipfrac"] == pytest.approx(clipped, rel=1e-6)
        assert result.metrics["actor/pg_clipfrac_lower"] == pytest.approx(bounded, rel=1e-6)


def test_bypass_statistics_without_a_kept_token_are_zero(tiny_model: Path, rollout: Rollout):
    keys = {"bypass_mode": True, "rollout_rs": "token_k3", "rollout_rs_threshold": 1e-9}

    metrics = Learner(learner_config(tiny_model, **keys)).update(sampled(rollout)).metrics

    assert [metrics[f"actor/{name}"] for name in ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")] == [0.0] * 3
    assert "kept_share" not in metrics


def test_metrics_of_several_mini_batches_in_bypass_mode_are_their_mean(tiny_model: Path, rollout: Rollout):
    settings = {"bypass_mode": True, "rollout_is": "token", "lr": 1e-12}
    trajectories = sampled(rollout)
    parts = [
        Learner(learner_config(tiny_model, **settings)).update(part).metrics
        for part in (trajectories[:3], trajectories[3:])
    ]

    whole = Learner(learner_config(tiny_model, mini_batch_size=3, **settings)).update(trajectories).metrics

    for name in ("rollout_corr/chi2_token", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_ppl"):
        assert whole[name] == pytest.approx((parts[0][name] + parts[1][name]) / 2, rel=1e-5)


def test_rejected_tokens_are_not_counted_as_trained(tiny_model: Path, rollout: Rollout):
    trajectories = sampled(rollout)
    tokens = sum(sum(t.response_mask) for t in trajectories)
    config = learner_config(tiny_model, bypass_mode=False, rollout_rs="token_k3", rollout_rs_threshold=0.5)

    metrics = Learner(config).update(trajectories).metrics

    share = metrics["rollout_corr/rollout_rs_masked_fraction"]
    assert 0 < share < 1
    assert metrics["training/trained_tokens"] == pytest.approx((1 - share) * tokens)


def test_a_rejected_trajectory_leaves_the_update_that_it_would_not_be_part_of(
    tiny_model: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    """One row's logprobs are absurd: rejecting it is as training on its group with the advantages of the whole."""
    trajectories = sampled(rollout, groups=1, n=4)
    absurd = trajectories[1].model_copy(
        update={"response_logprobs": [-30.0 * m for m in trajectories[1].response_mask]}
    )
    settings = {"bypass_mode": False, "dtype": "float64", "use_kl_loss": True, "entropy_coeff": 0.1}
    rejecting = Learner(learner_config(tiny_model, rollout_rs="seq_max_k2", rollout_rs_threshold=100.0, **settings))
    advantages = rejecting.update([trajectories[0], absurd, *trajectories[2:]]).advantages
    alone = Learner(learner_config(tiny_model, **settings))
    of_the_whole = torch.tensor([advantages[0], *advantages[2:]], dtype=torch.float64)
    monkeypatch.setattr(learner_module, "estimate", lambda config, inputs: of_the_whole)
    alone.update([trajectories[0], *trajectories[2:]])

    torch.testing.assert_close(weights(rejecting), weights(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mini_batch_size", [6, 3])
def test_an_update_of_which_nothing_is_left_keeps_the_weights(tiny_model: Path, rollout: Rollout, mini_batch_size: int):
    keys = {"bypass_mode": False, "rollout_rs": "token_k3", "rollout_rs_threshold": 1e-9}
    learner = Learner(learner_config(tiny_model, lr=1.0, use_kl_loss=True, mini_batch_size=mini_batch_size, **keys))
    before = weights(learner)

    metrics = learner.update(sampled(rollout)).metrics

    assert torch.equal(weights(learner), before)
    assert metrics["actor/skipped_steps"] == 6 / mini_batch_size
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0
    assert metrics["training/trained_tokens"] == 0.0
    assert "actor/pg_loss" not in metrics
    assert learner.updates == 1


def test_a_version_that_is_not_given_is_the_newest_that_sampled(tiny_model: Path, rollout: Rollout):
    newest = max(span.version for trajectory in sampled(rollout) for span in trajectory.weight_versions)
    outcomes = []
    for version in (None, newest, newest + 4):
        learner = Learner(learner_config(tiny_model, bypass_mode=False, proximal_logprobs="loglinear"))
        learner.update(sampled(rollout), version=version)
        outcomes.append(weights(learner))

    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_the_estimate_saves_the_pass_for_old_logprobs(tiny_model: Path, rollout: Rollout):
    passes = {}
    for source in ("recompute", "loglinear"):
        learner = Learner(learner_config(tiny_model, bypass_mode=False, proximal_logprobs=source))
        counted = []
        learner.policy.model.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        learner.update(sampled(rollout), version=4)
        passes[source] = len(counted)

    assert passes["recompute"] == passes["loglinear"] + 1


def test_versions_are_spread_over_the_columns_of_their_tokens(rollout: Rollout):
    spans = [WeightSpan(version=3, start=0, end=2), WeightSpan(version=5, start=4, end=6)]
    trajectories = [rollout(weight_versions=spans), rollout(0, 1, prompt_ids=[1], weight_versions=[])]

    assert token_versions(trajectories, 8, 7).tolist() == [[7, 7, 3, 3, 7, 7, 5, 5], [7.0] * 8]


def test_the_fields_of_a_correction_are_cut_with_the_rows(rollout: Rollout):
    short = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1], "response_logprobs": [-1.0, -1.0]}
    batch = TrainingBatch.of([rollout(), rollout(0, 1, **short)], [0.0, 1.0])
    values = torch.arange(16.0).reshape(2, 8)
    corrected = replace(batch, rollout_is_weights=values, loglinear_share=values / 16)

    row = corrected.rows(torch.tensor([1])).to(torch.device("cpu"))

    assert row.rollout_is_weights is not None
    assert row.loglinear_share is not None
    assert (row.rollout_is_weights.tolist(), row.loglinear_share.tolist()) == ([[8.0, 9.0]], [[0.5, 0.5625]])
    assert batch.rows(torch.tensor([1])).rollout_is_weights is None
