"""A value model beside the policy: its warm-up, its checkpoints, its passes, and what it learns."""

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.services.learner.test_learner_resume import ragged
from tests.services.trainer.learner_settings import learner_config, logprobs_of
from tests.tiny_models import tiny_qwen3
from trackway.learner.batch import TrainingBatch
from trackway.learner.critic import WEIGHT, exchange_head
from trackway.learner.learner import Learner
from trackway.learner.weights.loading import load_model
from trackway.wire.trajectory import TokenRow, Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
MICRO = "critic.ppo_micro_batch_size_per_gpu"
GAE = {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-2, "critic.ppo_mini_batch_size": 2}


def new(model: Path, **changes: Any) -> Learner:
    return Learner(learner_config(model, **{**GAE, "actor_rollout_ref.rollout.n": 4, "lr": 1e-2, **changes}))


def tensors(learner: Learner) -> dict[str, Tensor]:
    assert learner.critic is not None
    return {name: tensor.clone() for name, tensor in learner.critic.model.tensors().items()}


def test_the_policy_waits_for_the_step_of_its_first_update(tiny_model: Path, rollout: Rollout):
    learner = new(tiny_model, **{"trainer.critic_warmup": 3, "lr_warmup_steps": 2, "critic.optim.lr_warmup_steps": 4})
    policies, critics, metrics = [logprobs_of(learner)], [tensors(learner)], []
    for seed in range(4):
        metrics.append(learner.update(ragged(rollout, seed)).metrics)
        policies.append(logprobs_of(learner))
        critics.append(tensors(learner))

    assert [policies[0] == policy for policy in policies] == [True, True, True, False, False]
    heads = [critic["lm_head.weight"] for critic in critics]
    assert all((before != after).any() for before, after in pairwise(heads))
    # The policy's own warm-up begins with its first update.
    assert [row.get("actor/lr") for row in metrics] == [None, None, 5e-3, 1e-2]
    assert [row["critic/lr"] for row in metrics] == [2.5e-3, 5e-3, 7.5e-3, 1e-2]
    assert ["actor/pg_loss" in row for row in metrics] == [False, False, True, True]
    assert all("critic/vf_loss" in row and "critic/advantages/mean" in row for row in metrics)


def test_the_rates_of_the_policy_and_of_its_value_model_are_waves_of_their_own(tiny_model: Path, rollout: Rollout):
    wave = {"lr_scheduler_type": "cosine", "total_steps": 4}
    whole = {"lr": 8e-3, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.5, "num_cycles": 1.0}
    keys = {**wave, "lr": 4e-3, "min_lr_ratio": 0.25, "num_cycles": 1.5}
    learner = new(tiny_model, **keys, **{f"critic.optim.{name}": value for name, value in whole.items()})
    assert learner.critic is not None
    rates = []
    for seed in range(3):
        metrics = learner.update(ragged(rollout, seed)).metrics
        rates.append((metrics["actor/lr"], metrics["critic/lr"]))
        groups = (learner.optimizer.param_groups[0], learner.critic.optimizer.param_groups[0])
        assert tuple(group["lr"] for group in groups) == rates[-1]

    # One and a half waves of the policy's rate over four updates, of which cos(3 pi / 4) is that of the second.
    policy, values = zip(*rates, strict=True)
    assert policy == pytest.approx([4e-3, 1e-3 + 3e-3 * (1 - math.sqrt(0.5)) / 2, 2.5e-3], rel=1e-9)
    assert values == pytest.approx([8e-3, 6e-3, 4e-3], rel=1e-9)


def test_the_value_loss_has_a_divisor_of_its_own(tiny_model: Path, rollout: Rollout):
    def loss(scale: float) -> float:
        keys = {"critic.loss_agg_mode": "seq-mean-token-sum-norm", "critic.loss_scale_factor": scale}
        return (
            new(tiny_model, **keys, **{"critic.ppo_mini_batch_size": 256})
            .update(ragged(rollout))
            .metrics["critic/vf_loss"]
        )

    assert loss(4.0) == pytest.approx(loss(1.0) / 4, rel=1e-6) != 0


def test_the_mini_batches_of_a_value_model_are_drawn_by_a_seed_of_their_own(tiny_model: Path, rollout: Rollout):
    def after(**keys: Any) -> float:
        learner = new(tiny_model, **{"critic.ppo_mini_batch_size": 1, **{f"critic.{k}": v for k, v in keys.items()}})
        learner.update(ragged(rollout))
        return float(tensors(learner)["lm_head.weight"].double().sum())

    drawn = after(shuffle=True, data_loader_seed=6)
    assert drawn == after(shuffle=True, data_loader_seed=6)
    assert drawn != after(shuffle=True, data_loader_seed=7)
    assert after(shuffle=False, data_loader_seed=6) == after(shuffle=False) != drawn


def test_gradient_checkpointing_computes_the_layers_of_a_value_model_again(tiny_model: Path, rollout: Rollout):
    def passes(is_checkpointed: bool) -> int:
        """How often the first layer is computed in an update."""
        learner, calls = (
            new(tiny_model, **{"critic.model.enable_gradient_checkpointing": is_checkpointed}),
            list[None](),
        )
        assert learner.critic is not None
        layer = learner.critic.model.model.get_submodule("model.layers.0.mlp")
        layer.register_forward_pre_hook(lambda *_: calls.append(None))
        learner.update(ragged(rollout))
        return len(calls)

    assert passes(True) > passes(False) > 0


def test_a_learner_resumed_with_its_value_model_goes_on_bit_for_bit(tiny_model: Path, rollout: Rollout, tmp_path: Path):
    changes = {"critic.shuffle": True, "critic.ppo_epochs": 2, "critic.optim.lr_warmup_steps": 4, "bypass_mode": False}
    changes |= {"trainer.critic_warmup": 4}  # the checkpoint is of a policy without a step
    batches = [ragged(rollout, seed) for seed in range(4)]
    straight, first, second = (new(tiny_model, **changes) for _ in range(3))
    expected = [straight.update(batch).metrics for batch in batches]

    metrics = [first.update(batch).metrics for batch in batches[:2]]
    first.save(tmp_path / "global_step_2" / "actor")
    second.load(tmp_path / "global_step_2" / "actor")
    metrics += [second.update(batch).metrics for batch in batches[2:]]

    assert metrics == expected
    torch.testing.assert_close(tensors(second), tensors(straight), rtol=0, atol=0)
    names = sorted(path.name for path in (tmp_path / "global_step_2" / "critic").iterdir())
    assert names == ["extra_state.safetensors", "model.safetensors", "optim.safetensors"]


def test_a_checkpoint_without_a_value_model_starts_a_new_one(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    without = new(tiny_model, **{"algorithm.adv_estimator": "grpo"})
    without.update(ragged(rollout))
    without.save(tmp_path / "actor")
    learner = new(tiny_model)
    with caplog.at_level(logging.WARNING):
        learner.load(tmp_path / "actor")

    assert without.critic is None
    assert logprobs_of(learner) == logprobs_of(without)
    assert "has no value model; its training starts from" in caplog.text
    assert float(tensors(learner)["lm_head.weight"].abs().max()) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"critic.model.use_remove_padding": True},
        {"critic.ppo_micro_batch_size_per_gpu": 3, "critic.forward_micro_batch_size_per_gpu": 5},
        {"critic.use_dynamic_bsz": True, "critic.ppo_max_token_len_per_gpu": 30},
        {"critic.model.enable_gradient_checkpointing": True},
    ],
)
def test_how_the_passes_are_computed_changes_nothing_but_rounding(
    tiny_model: Path, rollout: Rollout, changes: dict[str, object]
):
    learners = [new(tiny_model, dtype="float64", **given) for given in ({}, changes)]
    found = [[learner.update(ragged(rollout, seed)).metrics for seed in range(2)] for learner in learners]

    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(*map(tensors, learners), rtol=0, atol=1e-9)


def test_the_rows_of_a_trajectory_are_one_sequence_in_micro_batches_too(tiny_model: Path, rollout: Rollout):
    row = TokenRow(
        prompt_ids=[1, 2], response_ids=[3, 4, 5], response_mask=[1, 0, 1], response_logprobs=[-1.0, 0.0, -2.0]
    )
    batch = [rollout(score=1.0, further_rows=[row]), rollout(0, 1, response_ids=[1, 2, 30, 31, 3, 4])]
    keys = {"critic.loss_agg_mode": "seq-mean-token-mean", "critic.cliprange_value": 9.0}
    learners = [new(tiny_model, dtype="float64", **keys, **given) for given in ({}, {MICRO: 1})]
    found = [[learner.update(batch).metrics["critic/vf_loss"] for _ in range(2)] for learner in learners]

    assert found[0] == pytest.approx(found[1], rel=1e-6)
    # The value is 0 and the return 1 at six tokens of the first trajectory, and 0 at the four of the second.
    assert found[0][0] == pytest.approx(0.5 * (1 + 0) / 2, rel=1e-12)


def test_values_learn_the_scores_of_their_prompts(tiny_model: Path, rollout: Rollout):
    learner = new(tiny_model, **{"critic.ppo_epochs": 4, "critic.cliprange_value": 10.0, "lr": 1e-9})
    batch = [rollout(row, 0, float(row % 2), prompt_ids=[10, 20 + row % 2, 12]) for row in range(4)]

    explained = [learner.update(batch).metrics["critic/vf_explained_var"] for _ in range(12)]

    assert explained[0] == pytest.approx(0.0, abs=1e-4)
    assert explained[-1] > 0.9


def test_an_update_tells_the_seconds_of_the_value_models_parts(tiny_model: Path, rollout: Rollout):
    without = new(tiny_model, **{"algorithm.adv_estimator": "grpo"}).update(ragged(rollout))

    seconds = new(tiny_model).update(ragged(rollout)).seconds

    assert (set(seconds), min(seconds.values()) > 0, without.seconds) == ({"values", "update_critic"}, True, {})


def test_a_value_is_that_of_the_tokens_before_it(tiny_model: Path, rollout: Rollout):
    learner = new(tiny_model)
    assert learner.critic is not None
    with torch.no_grad():
        torch.nn.init.ones_(learner.critic.model.model.get_output_embeddings().weight)
    whole = rollout()
    changed = rollout(response_ids=[*whole.response_ids[:-1], 63])

    values, others = (
        learner.critic.values(TrainingBatch.of([trajectory], [0.0]))[0].tolist() for trajectory in (whole, changed)
    )

    assert values == others  # the last token, which differs, is in no value
    assert [value == 0.0 for value in values] == [True, True, False, False, True, True, False, False]


def test_other_estimators_may_have_a_value_model_and_train_as_without_it(tiny_model: Path, rollout: Rollout):
    keys = {"algorithm.adv_estimator": "reinforce_plus_plus"}
    without, learner = new(tiny_model, **keys), new(tiny_model, **keys, **{"critic.enable": True})
    expected = without.update(ragged(rollout))

    result = learner.update(ragged(rollout))

    assert result.advantages == expected.advantages
    assert {name: result.metrics[name] for name in expected.metrics} == expected.metrics
    assert logprobs_of(learner) == logprobs_of(without)
    assert result.metrics["critic/vf_loss"] > 0


def test_an_update_whose_tokens_are_all_rejected_trains_no_value_model(tiny_model: Path, rollout: Rollout):
    learner = new(tiny_model, rollout_rs="seq_max_k2", rollout_rs_threshold=1e-9, bypass_mode=False)

    result = learner.update(ragged(rollout))

    assert result.metrics["training/trained_tokens"] == 0
    assert "critic/vf_loss" not in result.metrics
    assert float(tensors(learner)["lm_head.weight"].abs().max()) == 0


@pytest.fixture
def small_vocabulary(tmp_path: Path) -> Path:
    return tiny_qwen3(tmp_path / "small", vocab_size=60, hidden_size=8)


def test_a_value_model_of_a_smaller_vocabulary_is_refused(tiny_model: Path, small_vocabulary: Path):
    with pytest.raises(ValueError, match=r"critic\.model\.path: expected a model that knows the policy's 64 .* got 60"):
        new(tiny_model, **{"critic.model.path": str(small_vocabulary)})


def test_a_head_of_several_labels_is_refused(small_vocabulary: Path):
    weights = load_file(small_vocabulary / "model.safetensors") | {WEIGHT: torch.zeros(3, 8)}
    save_file(weights, small_vocabulary / "model.safetensors", {"format": "pt"})

    with pytest.raises(ValueError, match=r"expected score.weight of shape \[1, 8\], got \[3, 8\]"):
        exchange_head(load_model(small_vocabulary, torch.float32), small_vocabulary)


def test_a_value_model_with_lora_trains_and_saves_its_adapter_and_its_head_alone(
    tiny_model: Path, rollout: Rollout, tmp_path: Path
):
    changes = {"critic.model.lora_rank": 4, "critic.model.lora_alpha": 8}
    batches = [ragged(rollout, seed) for seed in range(3)]
    straight, first, second = (new(tiny_model, **changes) for _ in range(3))
    assert straight.critic is not None
    before = {name: tensor.clone() for name, tensor in straight.critic.model.model.state_dict().items()}
    expected = [straight.update(batch).metrics for batch in batches]

    metrics = [first.update(batch).metrics for batch in batches[:2]]
    first.save(tmp_path / "actor")
    second.load(tmp_path / "actor")
    metrics += [second.update(batch).metrics for batch in batches[2:]]

    assert metrics == expected
    torch.testing.assert_close(tensors(second), tensors(straight), rtol=0, atol=0)
    changed = {
        name for name, tensor in straight.critic.model.model.state_dict().items() if (tensor != before[name]).any()
    }
    assert changed == {name for name in before if ".lora_" in name or name.startswith("lm_head.")}
    assert set(load_file(tmp_path / "critic" / "model.safetensors")) == changed
