"""verl's distillation keys: what is read, and which combinations are refused with a remedy."""

import re

import pytest

from trackway.run_config.compose import compose
from trackway.wire.errors import TrackwayError

D = "distillation"
ON = [f"{D}.enabled=true", f"{D}.teacher_models.teacher_model.model_path=teacher"]
LOSS = f"{D}.distillation_loss"


def test_verls_command_line_is_read():
    config = compose(
        [
            f"{D}.enabled=True",
            f"{D}.teacher_key=data_source",
            f"{D}.n_gpus_per_node=8",
            f"{D}.nnodes=1",
            f"+{D}.teacher_models.math.key=openai/gsm8k",
            f"+{D}.teacher_models.math.model_path=Qwen/Qwen3-4B",
            f"+{D}.teacher_models.math.num_replicas=2",
            f"+{D}.teacher_models.math.inference.tensor_model_parallel_size=4",
            f"+{D}.teacher_models.code.key=code",
            f"+{D}.teacher_models.code.model_path=Qwen/Qwen3-8B",
            f"{D}.teacher_models.teacher_model.key=null",
            f"{D}.teacher_models.teacher_model.model_path=null",
            f"{LOSS}.loss_mode=k1",
            f"{LOSS}.use_policy_gradient=True",
            f"{LOSS}.use_task_rewards=False",
            f"{LOSS}.loss_max_clamp=10.0",
            f"{LOSS}.use_chunked_topk=False",
        ]
    ).distillation

    assert {name: (teacher.key, teacher.model_path) for name, teacher in config.teacher_models.given.items()} == {
        "math": ("openai/gsm8k", "Qwen/Qwen3-4B"),
        "code": ("code", "Qwen/Qwen3-8B"),
    }
    assert config.teacher_key == "data_source"
    loss = config.distillation_loss
    assert (loss.loss_mode, loss.use_policy_gradient, loss.use_task_rewards, loss.loss_max_clamp) == (
        "k1",
        True,
        False,
        10.0,
    )
    assert (loss.topk, loss.distillation_loss_coef, loss.log_prob_min_clamp) == (32, 1.0, None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([f"{D}.enabled=true"], "teacher_models: expected a teacher, got none; set distillation.teacher_models"),
        ([*ON, f"{LOSS}.loss_mode=k1"], "expected a loss whose gradient depends on the teacher, got k1"),
        (
            [*ON, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.use_policy_gradient=true"],
            "use_policy_gradient: expected false with loss_mode=forward_kl_topk",
        ),
        ([*ON, f"{LOSS}.policy_loss_mode=gspo"], "policy_loss_mode: expected vanilla, got gspo"),
        (
            [*ON, f"+{D}.teacher_models.other.model_path=m", f"+{D}.teacher_models.other.key=x"],
            "expected teacher_model as the only teacher, got other too; give it another name",
        ),
        (
            [f"{D}.enabled=true", *(f"+{D}.teacher_models.{name}.model_path=m" for name in "ab")],
            "teacher_models.a.key: expected the data_source of its rows, got none beside other teachers",
        ),
        (
            [
                f"{D}.enabled=true",
                *(f"+{D}.teacher_models.{name}.{key}=m" for name in "ab" for key in ("model_path", "key")),
            ],
            "teacher_models: expected different keys, got 'm' twice",
        ),
        (
            [*ON, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=128", "data.max_response_length=4096"],
            "distillation.distillation_loss.topk: expected at most 262144 logprobs of a sequence, got 128 for each of",
        ),
        ([*ON, "trackway.rollouts_from=sessions"], "distillation.enabled: expected rollouts of rows"),
        ([*ON, f"+{D}.teacher_models.teacher_model.model=m"], "teacher_models.teacher_model.model"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_remedy(lines: list[str], message: str):
    with pytest.raises(TrackwayError, match=re.escape(message)):
        compose(lines)
