"""The forwards of one update in their order: old logprobs, reference, loss, each in micro-batches of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.learner.policy import Policy
from trackway.wire.trajectory import Trajectory

Rollout = Callable[..., Trajectory]
PROBED = 2
"""Sequences that the weights' proof scores before the update: the fixed one, and the one that all twelve share."""


def twelve(rollout: Rollout) -> list[Trajectory]:
    return [rollout(row // 4, row % 4, float(row % 2)) for row in range(12)]


def forwards(tiny_model: Path, sizes: Mapping[str, int], batch: list[Trajectory]) -> list[int]:
    """Trajectories of each forward of an update with a reference and recomputed old logprobs."""
    config = learner_config(tiny_model, use_kl_loss=True, bypass_mode=False, **sizes)
    learner = Learner(config)
    assert isinstance(learner.reference, Policy)
    return counted(learner, batch, learner.policy, learner.reference)


def counted(learner: Learner, batch: list[Trajectory], *models: Policy) -> list[int]:
    """Trajectories of each forward of these models in an update."""
    seen: list[int] = []
    for model in models:
        model.model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
        )
    learner.update(batch)
    return seen


def test_each_pass_has_a_micro_batch_size_of_its_own(tiny_model: Path, rollout: Rollout):
    sizes = {"micro_batch_size": 5, "log_prob_micro_batch_size": 4, "ref_micro_batch_size": 7}

    assert forwards(tiny_model, sizes, twelve(rollout)) == [4, 4, 4, 7, 5, PROBED, 5, 5, 2]


@pytest.mark.parametrize(
    ("given", "log_prob", "reference"),
    [({"log_prob_micro_batch_size": 6}, [6, 6], [6, 6]), ({}, [5, 5, 2], [5, 5, 2])],
)
def test_a_pass_without_a_size_takes_that_of_the_pass_before_it(
    tiny_model: Path, rollout: Rollout, given: dict[str, int], log_prob: list[int], reference: list[int]
):
    sizes = {"micro_batch_size": 5, **given}

    assert forwards(tiny_model, sizes, twelve(rollout)) == [*log_prob, *reference, PROBED, 5, 5, 2]


def test_passes_are_filled_up_to_their_own_number_of_tokens(tiny_model: Path, rollout: Rollout):
    batch = twelve(rollout)
    length = len(batch[0].prompt_ids + batch[0].response_ids)
    by_tokens = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 6 * length, "micro_batch_size": 1}

    tokens = {"log_prob_max_token_len_per_gpu": 4 * length, "ref_max_token_len_per_gpu": 3 * length}
    assert forwards(tiny_model, by_tokens | tokens, batch) == [4, 4, 4, 3, 3, 3, 3, PROBED, 6, 6]
    rows = {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size": 12}
    assert forwards(tiny_model, by_tokens | rows, batch) == [12, 12, PROBED, 6, 6]
    assert forwards(tiny_model, by_tokens | rows | {"ref_use_dynamic_bsz": True}, batch) == [12, 6, 6, PROBED, 6, 6]


@pytest.mark.parametrize(
    ("keys", "values", "update"),
    [
        ({}, [8, 4], [8, 4]),
        ({"ppo_micro_batch_size_per_gpu": 5}, [5, 5, 2], [5, 3, 4]),
        ({"ppo_micro_batch_size_per_gpu": 5, "forward_micro_batch_size_per_gpu": 7}, [7, 5], [5, 3, 4]),
        ({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 3}, [3] * 4, [2, 3, 3, 1, 3]),
        (
            {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 3, "forward_max_token_len_per_gpu": 6},
            [6, 6],
            [2, 3, 3, 1, 3],
        ),
    ],
)
def test_the_passes_of_a_value_model_have_sizes_of_their_own(
    tiny_model: Path, rollout: Rollout, keys: Mapping[str, int], values: list[int], update: list[int]
):
    batch = twelve(rollout)
    length = len(batch[0].prompt_ids + batch[0].response_ids)
    of_critic = {
        f"critic.{name}": size * length if "token_len" in name else size
        for name, size in {"ppo_mini_batch_size": 8, **keys}.items()
    }
    learner = Learner(learner_config(tiny_model, micro_batch_size=1, **{"algorithm.adv_estimator": "gae"}, **of_critic))
    assert learner.critic is not None

    assert counted(learner, batch, learner.critic.model) == [*values, *update]
