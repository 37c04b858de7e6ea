"""A learner from a checkpoint goes on as the one that wrote it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.learner import Learner
from trackway.run_config.policy import CheckpointContents
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


def ragged(rollout: Rollout, seed: int = 0) -> list[Trajectory]:
    """Three groups of four with responses of unequal length."""
    draw = random.Random(seed)
    made = []
    for row in range(12):
        size = draw.randint(2, 12)
        made.append(
            rollout(
                row // 4,
                row % 4,
                float(draw.random() < 0.5),
                response_ids=[draw.randrange(64) for _ in range(size)],
                response_mask=[1] * size,
                response_logprobs=[-draw.uniform(1, 4) for _ in range(size)],
            )
        )
    return made


@pytest.mark.parametrize(
    "changes", [{"use_kl_loss": True}, {"shuffle": True, "mini_batch_size": 5, "lr_warmup_steps": 4}]
)
def test_a_resumed_learner_goes_on_as_if_uninterrupted(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, changes: dict[str, bool | int]
):
    config = learner_config(tiny_model, lr=1e-2, **changes)
    batches = [ragged(rollout, seed) for seed in range(5)]
    straight = Learner(config)
    expected = [straight.update(batch).metrics for batch in batches]

    first = Learner(config)
    metrics = [first.update(batch).metrics for batch in batches[:3]]
    first.save(tmp_path)
    second = Learner(config)
    second.load(tmp_path)
    metrics += [second.update(batch).metrics for batch in batches[3:]]

    for resumed, uninterrupted in zip(metrics, expected, strict=True):
        assert resumed == pytest.approx(uninterrupted, abs=1e-6)
    assert logprobs_of(second) == logprobs_of(straight)


def test_a_resumed_run_keeps_the_original_reference_when_its_model_path_has_moved_on(
    tiny_model: Path, rollout: Rollout, tmp_path: Path
):
    batch = ragged(rollout)
    learner = Learner(learner_config(tiny_model, lr=1e-2, use_kl_loss=True))
    learner.update(batch)
    learner.save(tmp_path / "actor")
    learner.export(tmp_path / "huggingface")

    resumed = Learner(learner_config(tmp_path / "huggingface", lr=1e-2, use_kl_loss=True))
    resumed.load(tmp_path / "actor")

    kl = resumed.update(batch).metrics["actor/kl_loss"]
    assert kl == pytest.approx(learner.update(batch).metrics["actor/kl_loss"], abs=1e-6)
    assert kl > 1e-4


def test_a_learner_loads_the_contents_that_it_is_asked_for(tiny_model: Path, rollout: Rollout, tmp_path: Path):
    settings, lean = {"lr": 1e-2, "shuffle": True, "lr_warmup_steps": 3}, {"checkpoint.save_contents": ["model"]}
    learner = Learner(learner_config(tiny_model, **settings))
    learner.update(ragged(rollout))
    for name, contents in (("whole", {}), ("lean", lean)):
        learner.config = learner_config(tiny_model, **settings, **contents)
        learner.save(tmp_path / name)
    answer = logprobs_of(learner)

    weights_alone = Learner(learner_config(tiny_model, **settings, **{"checkpoint.load_contents": ["model"]}))
    weights_alone.load(tmp_path / "whole")
    from_lean = Learner(learner_config(tiny_model, **settings, **lean))
    from_lean.load(tmp_path / "lean")

    assert [path.name for path in (tmp_path / "lean").iterdir()] == ["model.safetensors"]
    for loaded in (weights_alone, from_lean):
        assert logprobs_of(loaded) == answer
        assert (loaded.updates, len(loaded.optimizer.state)) == (0, 0)
    with pytest.raises(ValueError, match=r"^expected optimizer and extra in .*/lean, got none: .* leave it out of"):
        Learner(learner_config(tiny_model, **settings)).load(tmp_path / "lean")


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        ({"save_contents": ["optimizer"]}, "expected model among save_contents"),
        ({"save_contents": ["model"], "load_contents": ["model", "extra"]}, "among save_contents, got extra"),
    ],
)
def test_contents_of_which_a_run_could_not_resume_are_refused(contents: dict[str, list[str]], error: str):
    with pytest.raises(ValueError, match=error):
        CheckpointContents.model_validate(contents)


@pytest.mark.parametrize("lora", [{}, {"actor_rollout_ref.model.lora_rank": 4}], ids=["whole", "LoRA"])
def test_bfloat16_weights_train_with_bfloat16_moments_and_resume_bit_for_bit(
    tiny_model: Path, rollout: Rollout, tmp_path: Path, lora: dict[str, object]
):
    keys = {f"actor_rollout_ref.{name}.fsdp_config.model_dtype": "bf16" for name in ("actor", "ref")}
    changes = {**keys, **lora, "critic.fsdp.model_dtype": "bf16", "critic.enable": True, "use_kl_loss": True}
    settings = {"lr": 1e-2, "critic.optim.lr": 1e-2, "dtype": "bfloat16", "bypass_mode": False, **changes}
    batches = [ragged(rollout, seed) for seed in range(3)]
    straight, first, second = (Learner(learner_config(tiny_model, **settings)) for _ in range(3))
    full = Learner(learner_config(tiny_model, **{name: settings[name] for name in settings if name not in keys}))
    expected = [straight.update(batch).metrics for batch in batches]

    metrics = [first.update(batch).metrics for batch in batches[:2]]
    first.save(tmp_path / "actor")
    second.load(tmp_path / "actor")
    metrics += [second.update(batch).metrics for batch in batches[2:]]

    assert metrics == expected
    assert straight.critic is not None
    optimizers = (straight.optimizer, straight.critic.optimizer)
    moments = [state[name] for of in optimizers for state in of.state.values() for name in ("exp_avg", "exp_avg_sq")]
    models = (straight.policy.model, straight.critic.model.model)
    weights = [parameter for model in models for parameter in model.parameters()]
    assert {tensor.dtype for tensor in (*moments, *weights)} == {torch.bfloat16}
    assert logprobs_of(second) == logprobs_of(straight)
    near = full.update(batches[0]).metrics
    assert expected[0]["actor/pg_loss"] == pytest.approx(near["actor/pg_loss"], abs=0.05)
    assert expected[0]["actor/grad_norm"] == pytest.approx(near["actor/grad_norm"], rel=0.05)
    assert expected[0] != near
