"""verl's asynchronous trainers: their recipes set the keys that decide here, and what cannot be honoured is refused."""

import pytest
from pydantic import JsonValue

from trackway.run_config import RunConfig, compose, no_effect
from trackway.run_config.compose import resolve
from trackway.trainer.loop.from_config import pacing, update_mode
from trackway.trainer.loop.scheduler import Pacing
from trackway.wire.errors import ErrorCode, TrackwayError

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
SEPARATE = "trainer.v1.trainer_mode=separate_async"
SAMPLER = "trainer.v1.sampler"


def decided(config: RunConfig) -> tuple[Pacing, JsonValue, JsonValue]:
    """The pacing, the number of steps, and how often a validation is due."""
    return pacing(config), config.trainer.total_training_steps, config.trainer.test_freq


def test_fully_async_counts_a_step_in_mini_batches_and_a_run_in_prompts():
    config = compose(
        [
            *("data.train_batch_size=0", "data.gen_batch_size=1", f"{MINI}=32"),
            *("rollout.total_rollout_steps=51200", "rollout.test_freq=10", "rollout.nnodes=1"),
            *("async_training.require_batches=4", "async_training.partial_rollout=True"),
            *("async_training.use_rollout_log_probs=True", "async_training.use_trainer_do_validate=True"),
        ],
        config_name="fully_async_ppo_trainer",
    )

    assert decided(config) == (Pacing(batch_size=128, depth=0.1, bound=1, sync_every=4), 400, 40)
    assert config.algorithm.rollout_correction.bypass_mode and update_mode(config) == "abort"
    assert dict(no_effect(config.trackway.ignored_keys)) == {
        "rollout.nnodes": "engines, replicas and GPUs belong to the rollout service's Serve config",
        "async_training.use_rollout_log_probs": (
            "algorithm.rollout_correction.bypass_mode decides; another value is refused"
        ),
        "async_training.use_trainer_do_validate": "rollout replicas run the validation, beside the training",
    }


def test_one_step_off_trains_on_the_rollouts_of_the_version_before():
    recipe = ["data.train_batch_size=1152", f"{MINI}=192", "actor_rollout_ref.hybrid_engine=False"]
    config = compose(recipe, config_name="one_step_off_ppo_trainer")

    assert decided(config) == (Pacing(batch_size=1152, depth=1, bound=1), None, -1)
    assert config.algorithm.rollout_correction.bypass_mode
    assert config.actor_rollout_ref.rollout.free_cache_engine is False


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Pacing(batch_size=1024, depth=1, bound=7, drop=True)),
        ([f"{MINI}=8", f"{SAMPLER}.max_off_policy_threshold=3"], Pacing(batch_size=32, depth=1, bound=2, drop=True)),
        (
            [f"{MINI}=8", "trainer.v1.separate_async.parameter_sync_step=2", f"{SAMPLER}.max_off_policy_strategy=wait"],
            Pacing(batch_size=16, depth=1, bound=7),
        ),
        (["trainer.v1.separate_async.num_warmup_batches=2"], Pacing(batch_size=1024, depth=2, bound=7, drop=True)),
        (["trainer.v1.separate_async.num_warmup_batches=0"], Pacing(batch_size=1024, depth=0, bound=7, drop=True)),
    ],
)
def test_the_v1_trainer_with_separate_engines_publishes_after_each_batch(words: list[str], expected: Pacing):
    config = compose([SEPARATE, *words])

    assert pacing(config) == expected
    assert resolve(config.model_dump(mode="json")) == config  # as the trainer service does with what it is sent


def test_the_v1_trainer_with_engines_on_its_gpus_publishes_after_each_batch_and_runs_ahead_by_part_of_one():
    config = compose(["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0.5"])

    assert pacing(config) == Pacing(batch_size=1024, depth=0.5, bound=7, drop=True)


def test_the_v1_trainers_mode_sync_leaves_the_decision_to_async_training():
    assert pacing(compose(["trainer.v1.trainer_mode=sync", f"{SAMPLER}.max_off_policy_threshold=2"])) == Pacing(1024)
    assert pacing(compose([SEPARATE, "trainer.use_v1=False"])) == Pacing(1024)  # verl's older trainer does not read it
    ahead = compose(["trainer.v1.trainer_mode=sync", "async_training.staleness_threshold=1"])
    assert pacing(ahead) == Pacing(1024, depth=1, bound=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trackway.over_sample_rate=0.2"], Pacing(1024, bound=2, over_sample=0.2)),
        (["actor_rollout_ref.rollout.over_sample_rate=0.2"], Pacing(1024, bound=2, over_sample=0.2)),
        (
            ["actor_rollout_ref.rollout.over_sample_rate=0", "trackway.over_sample_rate=0.2"],
            Pacing(1024, bound=2, over_sample=0.2),
        ),
        (
            ["trackway.over_sample_rate=0.2", "async_training.staleness_threshold=1"],
            Pacing(1024, depth=1, bound=3, over_sample=0.2),
        ),
        (
            ["trackway.over_sample_rate=0.8", "async_training.trigger_parameter_sync_step=2"],
            Pacing(1024, bound=3, sync_every=2, over_sample=0.8),
        ),
        (
            ["trackway.over_sample_rate=0.2", "trackway.max_staleness=1"],
            Pacing(1024, bound=1, over_sample=0.2),
        ),
    ],
)
def test_a_rate_of_over_sampling_leaves_groups_to_later_steps_and_raises_the_bound(words: list[str], expected: Pacing):
    config = compose(words)

    assert pacing(config) == expected
    assert resolve(config.model_dump(mode="json")) == config
    assert config.may_be_stale and config.correction.rollout_is == "token"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trainer.v1.trainer_mode=colocate_async", "async_training.staleness_threshold=3"],
            "trainer.v1.colocate_async.num_warmup_batches, which is 1.0, got 3",
        ),
        ([SEPARATE, "data.train_batch_size=512"], f"parameter_sync_step x {MINI}, which is 1024, got 512; make them"),
        ([SEPARATE, "async_training.staleness_threshold=3"], "num_warmup_batches, which is 1.0, got 3"),
        (
            ["rollout.total_rollout_steps=4096", "trainer.total_training_steps=5"],
            "trainer.total_training_steps: expected rollout.total_rollout_steps / data.train_batch_size, which is 4",
        ),
        (["rollout.test_freq=2", "trainer.test_freq=3"], "trainer.test_freq: expected rollout.test_freq x "),
        (["async_training.require_batches=2", "data.train_batch_size=256"], f"require_batches x {MINI}, which is 512"),
        (
            ["trackway.over_sample_rate=0.1", "actor_rollout_ref.rollout.over_sample_rate=0.2"],
            "trackway.over_sample_rate: expected actor_rollout_ref.rollout.over_sample_rate, which is 0.2, got 0.1",
        ),
        (
            ["trackway.over_sample_rate=0.6", "trackway.max_staleness=1"],
            "trackway.over_sample_rate: expected at most trackway.max_staleness (1) versions ahead, got 1.5 on average",
        ),
        (["trackway.over_sample_rate=1"], "trackway.over_sample_rate: Input should be less than 1"),
        (
            ["actor_rollout_ref.rollout.over_sample_rate=many"],
            "actor_rollout_ref.rollout.over_sample_rate: Input should be a valid number",
        ),
        ([f"{SAMPLER}.max_off_policy_strategy=evict"], f"{SAMPLER}.max_off_policy_strategy: Input should be 'drop'"),
    ],
)
def test_keys_that_disagree_or_ask_for_what_there_is_not_are_refused_by_name(words: list[str], message: str):
    with pytest.raises(TrackwayError) as caught:
        compose(words)

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert message in caught.value.message
