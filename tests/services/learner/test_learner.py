"""One update: what it trains on, what it does not depend on, and what it reports."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.algorithm import AGGREGATIONS
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import EmptyBatchError, Learner
from trackway.learner.policy import Policy
from trackway.wire.trajectory import StopReason, Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


def ragged(rollout: Rollout, seed: int = 0, groups: int = 3, n: int = 4) -> list[Trajectory]:
    """Trajectories of unequal length and unequal shares of model tokens, with plausible sampler logprobs."""
    draw = random.Random(seed)
    result = []
    for sample_index in range(groups):
        prompt = [draw.randrange(64) for _ in range(draw.randint(2, 6))]
        for rollout_n in range(n):
            mask = [1, *(draw.randint(0, 1) for _ in range(draw.randint(1, 12)))]
            made = rollout(
                sample_index,
                rollout_n,
                float(draw.random() < 0.5),
                prompt_ids=prompt,
                response_ids=[draw.randrange(64) for _ in mask],
                response_mask=mask,
                response_logprobs=[-draw.uniform(1, 4) * m for m in mask],
            )
            result.append(made)
    return result


def as_sampled(learner: Learner, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The same trajectories with the learner's own logprobs, as a sampler of equal weights reports them."""
    pairs = zip(trajectories, learner.log_probs(trajectories), strict=True)
    return [t.model_copy(update={"response_logprobs": logprobs}) for t, logprobs in pairs]


def gradients(config: LearnerConfig, trajectories: list[Trajectory]) -> list[torch.Tensor]:
    """The gradients that reach the first optimizer step."""
    learner, seen = Learner(config), []
    parameters = list(learner.policy.model.parameters())
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in parameters if p.grad is not None])
    )
    learner.update(trajectories)
    return seen[0]


def loss_config(tiny_model: Path, **changes: object) -> LearnerConfig:
    everything = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.05, "clip_grad": 1e9}
    return learner_config(tiny_model, dtype="float64", **{**everything, **changes})


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_gradients_do_not_depend_on_the_micro_batch_size(
    tiny_model: Path, rollout: Rollout, mode: str, micro_batch_size: int
):
    trajectories = ragged(rollout)

    whole = gradients(loss_config(tiny_model, loss_agg_mode=mode), trajectories)
    parts = gradients(loss_config(tiny_model, loss_agg_mode=mode, micro_batch_size=micro_batch_size), trajectories)

    assert max(float(g.abs().max()) for g in whole) > 0.01
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("remove_padding", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 16384])
def test_passes_filled_by_tokens_give_the_same_gradients_and_metrics(
    tiny_model: Path, rollout: Rollout, tokens: int, remove_padding: bool
):
    trajectories, by_tokens = ragged(rollout), {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": tokens}
    whole = loss_config(tiny_model, remove_padding=remove_padding)
    parts = loss_config(tiny_model, remove_padding=remove_padding, micro_batch_size=1, **by_tokens)

    torch.testing.assert_close(gradients(parts, trajectories), gradients(whole, trajectories), rtol=0, atol=1e-12)
    assert Learner(parts).update(trajectories).metrics == pytest.approx(Learner(whole).update(trajectories).metrics)


def test_the_gradient_is_that_of_the_loss_written_out_token_by_token(tiny_model: Path, rollout: Rollout):
    config = loss_config(tiny_model, kl_loss_type="kl")
    trajectories = as_sampled(Learner(config), ragged(rollout))
    model, loss, tokens = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64), torch.zeros(()), 0
    for trajectory, advantage in zip(trajectories, Learner(config).update(trajectories).advantages, strict=True):
        ids = trajectory.prompt_ids + trajectory.response_ids
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        for place, by_model in enumerate(trajectory.response_mask, start=len(trajectory.prompt_ids)):
            entropy = -(logp[place - 1].exp() * logp[place - 1]).sum()
            # At equal weights the clipped ratio's gradient is that of logp, and so is the k1 penalty's.
            loss = loss + by_model * ((0.1 - advantage) * logp[place - 1, ids[place]] - 0.05 * entropy)
            tokens += by_model
    (loss / tokens).backward()

    expected = [p.grad for p in model.parameters()]
    torch.testing.assert_close(gradients(config, trajectories), expected, rtol=0, atol=1e-9)


def test_gradient_checkpointing_computes_layers_again_and_leaves_the_gradients_as_they_are(
    tiny_model: Path, rollout: Rollout
):
    trajectories, plain = ragged(rollout), loss_config(tiny_model)
    checkpointed = loss_config(tiny_model, gradient_checkpointing=True)

    def passes(config: LearnerConfig) -> int:
        """How often the first layer is computed in an update."""
        learner, calls = Learner(config), list[None]()
        learner.policy.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
            lambda *_: calls.append(None)
        )
        learner.update(trajectories)
        return len(calls)

    torch.testing.assert_close(gradients(checkpointed, trajectories), gradients(plain, trajectories), rtol=0, atol=1e-9)
    assert passes(checkpointed) > passes(plain) > 0


def test_metrics_do_not_depend_on_the_micro_batch_size(tiny_model: Path, rollout: Rollout):
    trajectories = ragged(rollout)

    whole = Learner(loss_config(tiny_model)).update(trajectories).metrics
    parts = Learner(loss_config(tiny_model, micro_batch_size=5)).update(trajectories).metrics

    assert parts == pytest.approx(whole, abs=1e-9)


def test_the_entropy_is_logged_as_a_loss_when_it_is_part_of_it(tiny_model: Path, rollout: Rollout):
    with_bonus = Learner(loss_config(tiny_model)).update(ragged(rollout)).metrics
    without = Learner(loss_config(tiny_model, entropy_coeff=0.0)).update(ragged(rollout)).metrics

    assert with_bonus["actor/entropy_loss"] == with_bonus["actor/entropy"] == pytest.approx(without["actor/entropy"])
    assert "actor/entropy_loss" not in without


def test_an_update_makes_the_better_answer_likelier_and_the_worse_one_less_likely(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, lr=1e-3))
    pair = [rollout(rollout_n=0, score=1.0), rollout(rollout_n=1, response_ids=[1, 2, 30, 31, 3, 4])]
    pair = as_sampled(learner, pair)

    before = [sum(logprobs) for logprobs in learner.log_probs(pair)]
    learner.update(pair)
    after = [sum(logprobs) for logprobs in learner.log_probs(pair)]

    assert after[0] > before[0] + 0.01
    assert after[1] < before[1] - 0.01


def test_the_first_update_on_sampled_logprobs_has_ratio_one(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, use_kl_loss=True))
    trajectories = as_sampled(learner, ragged(rollout))

    metrics = learner.update(trajectories).metrics

    assert metrics["training/rollout_logprob_diff_max"] < 1e-4
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert (metrics["actor/pg_clipfrac"], metrics["actor/kl_coef"]) == (0.0, 0.001)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_mask_shifted_by_one_shows_in_the_logprob_difference(tiny_model: Path, rollout: Rollout, recompute: bool):
    learner = Learner(learner_config(tiny_model, bypass_mode=not recompute))
    right = as_sampled(learner, ragged(rollout))

    shifted = [
        t.model_copy(
            update={
                "response_mask": [0, *t.response_mask[:-1]],
                "response_logprobs": [0.0, *t.response_logprobs[:-1]],
            }
        )
        for t in right
    ]

    assert learner.update(shifted).metrics["training/rollout_logprob_diff_max"] > 1.0


def test_an_empty_batch_is_refused_and_leaves_the_weights(tiny_model: Path):
    learner = Learner(learner_config(tiny_model, lr=1.0))
    before = logprobs_of(learner)

    with pytest.raises(EmptyBatchError, match="expected a trajectory to train on, got none; look at their errors"):
        learner.update([])

    assert (logprobs_of(learner), learner.updates) == (before, 0)


def test_a_trajectory_without_a_reward_is_refused_and_leaves_the_weights(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, lr=1.0))
    before = logprobs_of(learner)

    with pytest.raises(ValueError, match="expected a reward, got none in r/1/0/1; drop it with filter_trajectories"):
        learner.update([rollout(0, 0, 1.0), rollout(0, 1, reward=None)])

    assert (logprobs_of(learner), learner.updates) == (before, 0)


def test_an_update_returns_the_advantages_in_the_order_of_the_batch(tiny_model: Path, rollout: Rollout):
    batch = [rollout(7, 0, 1.0), rollout(8, 0, 0.5), rollout(7, 1, 0.0), rollout(8, 1, 0.5)]

    advantages = Learner(learner_config(tiny_model)).update(batch).advantages

    assert advantages == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5), 0.0], abs=2e-6)


def test_advantages_are_those_of_each_prompts_group(tiny_model: Path, rollout: Rollout):
    easy = [rollout(7, n, score) for n, score in enumerate([1.0, 1.0, 1.0, 0.0])]
    hard = [rollout(8, n, score) for n, score in enumerate([0.0, 0.0, 0.0, 1.0])]

    advantages = Learner(learner_config(tiny_model)).update([*easy, *hard]).advantages

    high, low = 0.499999000002, 1.499997000006
    assert advantages == pytest.approx([high, high, high, -low, -high, -high, -high, low], abs=1e-9)


def test_metrics_describe_the_batch(tiny_model: Path, rollout: Rollout):
    short = rollout(0, 1, 0.0, response_ids=[1, 2], response_mask=[1, 1], response_logprobs=[-1.0, -1.0], num_turns=2)
    full = rollout(0, 2, 0.5, stop_reason=StopReason.MAX_RESPONSE)

    metrics = Learner(learner_config(tiny_model, lr=1e-4)).update([rollout(0, 0, 1.0), short, full]).metrics

    expected = {
        "critic/score/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/score/min": 0.0,
        "critic/advantages/max": 0.5 / 0.500001,
        "critic/advantages/mean": (4 - 2) * 0.5 / 0.500001 / 10,
        "response_length/mean": 14 / 3,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/max": 3.0,
        "num_turns/min": 2.0,
        "num_turns/mean": 10 / 3,
        "perf/total_num_tokens": 23.0,
        "training/trained_tokens": 10.0,
        "actor/lr": 1e-4,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_each_mini_batch_and_epoch_is_an_optimizer_step(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, mini_batch_size=5, ppo_epochs=2))
    steps: list[int] = []
    learner.optimizer.register_step_pre_hook(lambda *_: steps.append(1))

    learner.update(ragged(rollout, groups=3, n=4))

    assert len(steps) == 6


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_observer_gets_the_trajectories_of_each_optimizer_step_and_changes_nothing(
    tiny_model: Path, rollout: Rollout, shuffle: bool
):
    config = learner_config(tiny_model, lr=1e-2, mini_batch_size=5, ppo_epochs=2, shuffle=shuffle)
    batch = ragged(rollout, groups=3, n=4)
    observations: list[tuple[list[str], dict[str, float]]] = []

    @contextmanager
    def observe(used: Sequence[Trajectory]) -> Iterator[Callable[[dict[str, float]], None]]:
        before = len(observations)
        yield lambda metrics: observations.append(([trajectory.id for trajectory in used], metrics))
        assert len(observations) == before + 1

    observed, alone = Learner(config), Learner(config)
    metrics = observed.update(batch, observe=observe).metrics
    alone.update(batch)

    used, sizes = [ids for ids, _ in observations], [5, 5, 2, 5, 5, 2]
    in_order = [trajectory.id for trajectory in batch]
    assert [len(ids) for ids in used] == sizes
    epochs = [sorted(name for ids in used[first : first + 3] for name in ids) for first in (0, 3)]
    assert epochs == [sorted(in_order)] * 2
    assert (used[0] == in_order[:5]) is not shuffle
    assert {reported["actor/lr"] for _, reported in observations} == {metrics["actor/lr"]}
    assert metrics["actor/grad_norm"] == pytest.approx(
        sum(reported["actor/grad_norm"] for _, reported in observations) / 6
    )
    assert logprobs_of(observed) == logprobs_of(alone)


def test_mini_batches_are_drawn_by_their_own_seed_if_there_is_one(tiny_model: Path, rollout: Rollout):
    def after(**seeds: int) -> list[float]:
        learner = Learner(learner_config(tiny_model, lr=1e-2, shuffle=True, mini_batch_size=2, **seeds))
        learner.update(ragged(rollout))
        return logprobs_of(learner)

    assert after(seed=1, data_loader_seed=6) == after(seed=2, data_loader_seed=6) == after(seed=6)
    assert after(seed=1, data_loader_seed=7) != after(seed=6)


def test_warm_up_climbs_in_equal_steps_from_the_first_update(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, lr=4e-4, lr_warmup_steps=4))

    rates = [learner.update(ragged(rollout, seed)).metrics["actor/lr"] for seed in range(5)]

    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4])


def test_a_gradient_that_is_not_finite_is_not_stepped_on(tiny_model: Path, rollout: Rollout):
    learner = Learner(learner_config(tiny_model, lr=1.0))
    before = logprobs_of(learner)
    next(learner.policy.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))

    metrics = learner.update([rollout(0, 0, 1.0), rollout(0, 1, 0.0)]).metrics

    assert metrics["actor/skipped_steps"] == 1.0
    assert logprobs_of(learner) == before


def test_prompts_of_one_index_in_two_steps_are_two_groups(tiny_model: Path, rollout: Rollout):
    def of_step(step: int, rollout_n: int, score: float) -> Trajectory:
        trajectory = rollout(0, rollout_n, score)
        return trajectory.model_copy(update={"tags": trajectory.tags.model_copy(update={"step": step})})

    trajectories = [of_step(1, 0, 1.0), of_step(1, 1, 1.0), of_step(2, 0, 0.0), of_step(2, 1, 0.0)]

    assert Learner(learner_config(tiny_model)).update(trajectories).advantages == [0.0] * 4


def test_learners_of_adapters_of_one_model_train_as_each_does_alone(tiny_model: Path, rollout: Rollout) -> None:
    configs = [
        learner_config(tiny_model, lora_rank=4, lora_alpha=32, target_modules="all-linear", lr=0.01),
        learner_config(tiny_model, lora_rank=2, lora_alpha=32, target_modules=["q_proj", "v_proj"], lr=0.01),
    ]
    batches = [ragged(rollout, seed) for seed in range(4)]
    alone = [Learner(config) for config in configs]
    shared = Policy(configs[0].policy_settings()._replace(lora=None))
    together = [Learner(config, policy=shared) for config in configs]

    for batch in batches:
        for learner, single in zip(together, alone, strict=True):
            learner.activate()
            assert learner.update(batch).metrics == single.update(batch).metrics

    for learner, single in zip(together, alone, strict=True):
        learner.activate()
        found, expected = learner.policy.tensors(), single.policy.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert logprobs_of(learner) == logprobs_of(single)
    shared.attach(None)
    assert not any("lora" in name for name in shared.model.state_dict())
