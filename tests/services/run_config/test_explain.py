"""Every key can be looked up: what it means, its default, and whether verl has it."""

import pytest

from trackway.run_config import Explanation, explain
from trackway.run_config.compose import known_keys
from trackway.run_config.unsupported_keys import DEPLOYMENT, MOVED, NO_EFFECT, ONLY
from trackway.wire.errors import ErrorCode, TrackwayError


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "data.train_batch_size",
            Explanation("data.train_batch_size", "Prompts per step, each with `rollout.n` rollouts.", 1024, "verl's"),
        ),
        (
            "trackway.seed",
            Explanation(
                "trackway.seed",
                "Seed of the learner, the row order, the choice of traced prompts, and, with its position, of each "
                "generation.",
                42,
                "ours",
            ),
        ),
        (
            "trainer.rollout_trace.backend",
            Explanation(
                "trainer.rollout_trace.backend",
                "Read as actor_rollout_ref.rollout.trace.backend.",
                None,
                "verl's, moved",
                honoured=False,
            ),
        ),
        (
            "algorithm.use_pf_ppo",
            Explanation(
                "algorithm.use_pf_ppo",
                "only False: PF-PPO is not implemented; leave it out",
                None,
                "verl's, other values are refused",
                honoured=False,
            ),
        ),
        (
            "critic.rollout_n",
            Explanation(
                "critic.rollout_n",
                "actor_rollout_ref.rollout.n decides; another value is refused",
                None,
                "verl's, no effect here",
                honoured=False,
            ),
        ),
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
            Explanation(
                "actor_rollout_ref.rollout.engine_kwargs.vllm",
                "Arguments of a vLLM server by name.",
                None,
                "verl's; decides how main_ppo deploys the services",
            ),
        ),
        (
            "critic.optim.lr",
            Explanation("critic.optim.lr", "Learning rate after the warm-up.", 1e-5, "verl's"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_says_what_it_means_and_where_it_is_from(key: str, expected: Explanation) -> None:
    assert explain(key) == [expected]


def test_a_section_lists_all_its_keys_and_nothing_lists_every_one() -> None:
    section = [explanation.key for explanation in explain("actor_rollout_ref.rollout.val_kwargs")]

    assert [explanation.key for explanation in explain("actor_rollout_ref.rollout.n")] == [
        "actor_rollout_ref.rollout.n"
    ]  # not name
    names = ("do_sample", "temperature", "top_p", "top_k", "n")
    assert section == [f"actor_rollout_ref.rollout.val_kwargs.{name}" for name in names]
    assert [explanation.key for explanation in explain()] == [*known_keys(), *MOVED, *ONLY, *NO_EFFECT]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("data.trian_batch_size", "data.train_batch_size"),
        ("tensor_model_parallel", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_coef"),
    ],
)
def test_a_typo_names_the_nearest_key_first(word: str, nearest: str) -> None:
    with pytest.raises(TrackwayError, match=f"unknown key '{word}': did you mean {nearest}") as caught:
        explain(word)

    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_the_keys_of_the_deployment_are_known_and_say_nothing_by_default() -> None:
    found = {key: explain(key)[0] for key in DEPLOYMENT}

    assert {explanation.source for explanation in found.values()} == {
        "verl's; decides how main_ppo deploys the services"
    }
    assert [explanation.default for explanation in found.values() if explanation.default is not None] == []


def test_a_key_says_which_of_verls_values_it_has_not():
    [name] = explain("actor_rollout_ref.rollout.name")

    assert name.honoured
    assert name.meaning.endswith("verl's trtllm is refused: take vllm or sglang, and its arguments.")
    assert "is refused" not in explain("actor_rollout_ref.rollout.n")[0].meaning
