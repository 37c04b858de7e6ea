"""What a configuration amounts to, with the numbers of verl's GSM8K script reckoned by hand."""

import pytest

from trackway.run_config import RunConfig, compose
from trackway.trainer.loop.forecast import Bounds, Forecast, forecast
from trackway.wire.errors import TrackwayError

pytestmark = pytest.mark.slow

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SCRIPT = [
    *("data.train_batch_size=256", "data.max_prompt_length=1024", "data.max_response_length=1024"),
    *("data.val_files=test.parquet", "trainer.test_freq=20", "trainer.save_freq=-1", "trainer.total_epochs=15"),
    *(f"{A}.ppo_mini_batch_size=256", f"{A}.ppo_micro_batch_size_per_gpu=32", f"{R}.n=16"),
    *(f"{R}.multi_turn.enable=true", f"{R}.multi_turn.max_assistant_turns=5"),
    *(f"{R}.trace.backend=weave", f"{R}.trace.token2text=True"),
]


def script(*words: str) -> RunConfig:
    return compose([*SCRIPT, *words])


def test_the_script_is_29_steps_an_epoch_and_435_in_all() -> None:
    plan = forecast(script(), 7473)

    assert plan == Forecast(
        steps_per_epoch=29,
        total_steps=435,
        prompts=256,
        trajectories=4096,
        updates=1,
        mini_batch=4096,
        micro_batch=32,
        passes=128,
        value_updates=0,
        value_mini_batch=0,
        validations=[0, *range(20, 421, 20), 435],
        checkpoints=[435],
        traced=4096,
        spans=Bounds(4, 16),
        trace_bytes=Bounds(4 * 700, 16 * 700 + 6 * 4 * 2048),
    )


@pytest.mark.parametrize(
    ("words", "updates", "mini_batch"),
    [
        ([], 1, 4096),
        (["critic.ppo_mini_batch_size=100"], 3, 1600),
        (["critic.ppo_epochs=2", "critic.ppo_mini_batch_size=128"], 4, 2048),
    ],
)
def test_a_value_model_has_its_own_updates(words: list[str], updates: int, mini_batch: int) -> None:
    plan = forecast(script("algorithm.adv_estimator=gae", *words), 7473)

    assert (plan.value_updates, plan.value_mini_batch) == (updates, mini_batch)


@pytest.mark.parametrize(
    ("words", "rows", "steps", "total"),
    [
        ([], 7423, 28, 420),
        (["data.drop_last=false"], 7473, 30, 450),
        (["trainer.total_training_steps=2"], 7473, 29, 2),
        (["trainer.val_only=true"], 7473, 29, 0),
        ([], None, None, None),
        (["trainer.total_training_steps=2"], None, None, 2),
    ],
)
def test_rows_and_bounds_make_the_steps(
    words: list[str], rows: int | None, steps: int | None, total: int | None
) -> None:
    plan = forecast(script(*words), rows)

    assert (plan.steps_per_epoch, plan.total_steps) == (steps, total)


def test_remax_adds_a_greedy_rollout_to_each_prompt() -> None:
    plan = forecast(script("algorithm.adv_estimator=remax"), 7473)

    assert (plan.trajectories, plan.traced, plan.mini_batch, plan.updates) == (256 * 17, 256 * 17, 4096, 1)


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(TrackwayError, match=r"expected at least data.train_batch_size=256 rows, got 255"):
        forecast(script(), 255)


def test_mini_batches_and_epochs_multiply_the_updates() -> None:
    plan = forecast(
        script(f"{A}.ppo_mini_batch_size=100", f"{A}.ppo_epochs=2", f"{A}.ppo_micro_batch_size_per_gpu=999"), 512
    )

    assert (plan.updates, plan.mini_batch, plan.micro_batch, plan.passes) == (6, 1600, 999, 2)


def test_validations_and_checkpoints_come_when_the_keys_say() -> None:
    words = ["trainer.save_freq=3", "trainer.test_freq=4", "trainer.val_before_train=false"]
    plan = forecast(script(*words, "trainer.total_training_steps=8"), 512)

    assert (plan.validations, plan.checkpoints) == ([4, 8], [3, 6, 8])
    assert forecast(script("data.val_files=[]"), 512).validations == []


def test_sampled_traces_without_text_cost_their_spans_only() -> None:
    plan = forecast(script("trackway.trace_prompts_per_step=3", f"{R}.trace.token2text=False"), 512)

    assert (plan.traced, plan.trace_bytes) == (48, Bounds(2800, 11200))
    assert forecast(compose([]), 2048).traced == 0
