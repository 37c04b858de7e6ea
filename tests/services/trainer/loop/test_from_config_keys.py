"""Where each key arrives: alone, with a value that is not its default, it changes these fields and no others."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from pydantic import JsonValue

from trackway.trainer.config import RunConfig, compose, resolve
from trackway.trainer.loop.from_config import (
    learner_config,
    plan,
    retry_policy,
    sharing,
    trace_target,
    training_template,
    validation_template,
)
from trackway.trainer.loop.rollout_client import GroupTemplate

Keys = dict[str, JsonValue]
Fields = dict[str, object]
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
GIVEN: Keys = {"trackway.device": "cpu"}
STEPS, STEPS_PER_EPOCH = 40, 7


def asks(**changed: object) -> Fields:
    """The same fields of the training and the validation template; a dot is written `__`."""
    names = {name.replace("__", "."): value for name, value in changed.items()}
    return {f"{template}.{name}": value for template in ("training", "validation") for name, value in names.items()}


KEYS: dict[str, tuple[JsonValue, Fields]] = {
    "data.max_prompt_length": (99, {"plan.max_prompt_length": 99, **asks(limits__max_prompt_length=99)}),
    "data.max_response_length": (
        98,
        {"learner.loss_scale_factor": 98.0, **asks(limits__max_response_length=98, sampling__max_tokens=98)},
    ),
    "data.truncation": ("left", asks(limits__prompt_truncation="left")),
    "data.train_batch_size": (512, {}),
    f"{MODEL}.path": ("m", {"learner.model_path": "m"}),
    f"{MODEL}.use_remove_padding": (False, {"learner.remove_padding": False}),
    f"{MODEL}.enable_gradient_checkpointing": (False, {"learner.gradient_checkpointing": False}),
    f"{ACTOR}.optim.lr": (0.5, {"learner.lr": 0.5}),
    f"{ACTOR}.optim.betas": ([0.1, 0.2], {"learner.betas": (0.1, 0.2)}),
    f"{ACTOR}.optim.weight_decay": (3.0, {"learner.weight_decay": 3.0}),
    f"{ACTOR}.optim.lr_warmup_steps": (3, {"learner.lr_warmup_steps": 3}),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": (0.15, {"learner.lr_warmup_steps": 6}),
    f"{ACTOR}.optim.lr_scheduler_type": ("cosine", {"learner.lr_scheduler_type": "cosine"}),
    f"{ACTOR}.optim.min_lr_ratio": (0.25, {"learner.min_lr_ratio": 0.25}),
    f"{ACTOR}.optim.clip_grad": (4.0, {"learner.clip_grad": 4.0}),
    f"{ACTOR}.grad_clip": (5.0, {"learner.clip_grad": 5.0}),
    f"{ACTOR}.fsdp_config.param_offload": (True, {"learner.param_offload": True}),
    f"{ACTOR}.fsdp_config.optimizer_offload": (True, {"learner.optimizer_offload": True}),
    f"{ACTOR}.ppo_mini_batch_size": (32, {"learner.mini_batch_size": 32, "learner.micro_batch_size": 32}),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (4, {"learner.micro_batch_size": 4}),
    f"{ACTOR}.ppo_epochs": (6, {"learner.ppo_epochs": 6}),
    f"{ACTOR}.shuffle": (True, {"learner.shuffle": True}),
    f"{ACTOR}.clip_ratio": (0.1, {"learner.clip_ratio_low": 0.1, "learner.clip_ratio_high": 0.1}),
    f"{ACTOR}.clip_ratio_low": (0.3, {"learner.clip_ratio_low": 0.3}),
    f"{ACTOR}.clip_ratio_high": (0.4, {"learner.clip_ratio_high": 0.4}),
    f"{ACTOR}.clip_ratio_c": (7.0, {"learner.clip_ratio_c": 7.0}),
    f"{ACTOR}.loss_agg_mode": ("token-sum", {"learner.loss_agg_mode": "token-sum"}),
    f"{ACTOR}.loss_scale_factor": (8.0, {"learner.loss_scale_factor": 8.0}),
    f"{ACTOR}.entropy_coeff": (0.9, {"learner.entropy_coeff": 0.9}),
    f"{ACTOR}.use_kl_loss": (True, {"learner.use_kl_loss": True}),
    f"{ACTOR}.kl_loss_coef": (0.6, {"learner.kl_loss_coef": 0.6}),
    f"{ACTOR}.kl_loss_type": ("k1", {"learner.kl_loss_type": "k1"}),
    f"{REF}.log_prob_micro_batch_size_per_gpu": (9, {"learner.ref_micro_batch_size": 9}),
    f"{REF}.fsdp_config.param_offload": (True, {"learner.ref_param_offload": True}),
    f"{ROLLOUT}.n": (
        8,
        {
            "learner.mini_batch_size": 2048,
            "learner.micro_batch_size": 2048,
            "plan.rollouts": 8,
            "training.n": 8,
        },
    ),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (10, {"learner.log_prob_micro_batch_size": 10}),
    f"{ROLLOUT}.temperature": (0.7, {"learner.temperature": 0.7, "training.sampling.temperature": 0.7}),
    f"{ROLLOUT}.top_p": (0.8, {"training.sampling.top_p": 0.8}),
    f"{ROLLOUT}.top_k": (11, {"training.sampling.top_k": 11}),
    f"{ROLLOUT}.val_kwargs.n": (12, {"plan.validation_n": 12, "validation.n": 12}),
    f"{ROLLOUT}.val_kwargs.temperature": (0.6, {}),
    f"{ROLLOUT}.val_kwargs.top_p": (0.5, {"validation.sampling.top_p": 0.5}),
    f"{ROLLOUT}.val_kwargs.top_k": (13, {"validation.sampling.top_k": 13}),
    f"{ROLLOUT}.multi_turn.enable": (True, asks(default_agent="tool_agent")),
    f"{ROLLOUT}.agent.default_agent_loop": ("mine", asks(default_agent="mine")),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": (14, asks(limits__max_assistant_turns=14)),
    f"{ROLLOUT}.multi_turn.max_parallel_calls": (15, asks(limits__max_parallel_calls=15)),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": (16, asks(limits__max_tool_response_length=16)),
    f"{ROLLOUT}.multi_turn.tool_response_truncate_side": ("left", asks(limits__tool_response_truncate_side="left")),
    f"{ROLLOUT}.trace.backend": (
        ["otlp"],
        {"trace.backends": ("otlp",), "trace.token2text": False, "plan.traced_prompts": 1024},
    ),
    f"{ROLLOUT}.trace.token2text": (True, {"trace.token2text": True}),
    f"{ROLLOUT}.trace.project_name": ("me/traces", {"trace.weave_project": "me/traces"}),
    f"{ROLLOUT}.trace.experiment_name": ("traced", asks(experiment_name="traced")),
    f"{ROLLOUT}.trace.max_samples_per_step_per_worker": (17, {"plan.traced_prompts": 17}),
    f"{ROLLOUT}.free_cache_engine": (True, {"sharing.wanted": True}),
    f"{ROLLOUT}.multi_stage_wake_up": (False, {"sharing.staged": False}),
    "algorithm.norm_adv_by_std_in_grpo": (False, {"learner.norm_adv_by_std": False}),
    "algorithm.rollout_correction.bypass_mode": (True, {"learner.recompute_old_logprobs": False}),
    "trainer.project_name": ("me/runs", {"trace.weave_project": "me/runs"}),
    "trainer.experiment_name": ("mine", asks(experiment_name="mine")),
    "trainer.total_epochs": (2, {"plan.total_steps": 14}),
    "trainer.total_training_steps": (5, {"plan.total_steps": 5}),
    "trainer.save_freq": (18, {"plan.save_freq": 18}),
    "trainer.test_freq": (19, {"plan.test_freq": 19}),
    "trainer.val_before_train": (False, {"plan.val_before_train": False}),
    "trainer.val_only": (True, {"plan.total_steps": 0}),
    "trainer.max_actor_ckpt_to_keep": (20, {"plan.keep_checkpoints": 20}),
    "trainer.n_gpus_per_node": (4, {"plan.gpus": 4}),
    "trainer.nnodes": (2, {}),
    "trackway.seed": (5, {"learner.seed": 5, "plan.seed": 5, **asks(sampling__seed=5)}),
    "trackway.device": ("cuda:1", {"learner.device": "cuda:1", "learner.dtype": "bfloat16"}),
    "trackway.dtype": ("bfloat16", {"learner.dtype": "bfloat16"}),
    "trackway.threads": (21, {"learner.threads": 21}),
    "trackway.max_inflight_groups": (22, {"retry_policy.max_inflight": 22}),
    "trackway.group_attempts": (23, {"retry_policy.attempts": 23}),
    "trackway.group_timeout_s": (24.0, {"retry_policy.timeout_s": 24.0}),
    "trackway.trajectory_timeout_s": (25.0, asks(limits__timeout_s=25.0)),
    "trackway.tools": (["search"], asks(tools=["search"])),
    "trackway.max_tool_response_tokens": (26, asks(limits__max_tool_response_tokens=26)),
    "trackway.on_bad_call": ("end", asks(limits__on_bad_call="end")),
    "trackway.trace_prompts_per_step": (27, {"plan.traced_prompts": 27}),
    "trackway.trace_validation_samples": (28, {"plan.traced_validation": 28}),
    "trackway.max_staleness": (29, {"plan.max_staleness": 29}),
    "trackway.storage_wait_s": (30.0, {"plan.storage_wait_s": 30.0}),
    "trackway.sleep_timeout_s": (31.0, {"sharing.timeout_s": 31.0}),
    "trackway.wandb_run_id": ("r1", {"trace.wandb_run_id": "r1"}),
}
"""Key -> a value for it, and the fields that it changes, each with what it becomes."""

TOGETHER: list[tuple[Keys, Fields]] = [
    (
        {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 0.6},
        {"validation.sampling.temperature": 0.6},
    ),
    ({f"{ROLLOUT}.multi_turn.max_tool_response_length": None}, asks(limits__max_tool_response_length=None)),
    ({"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2}, {"plan.gpus": 8}),
    ({"trainer.n_gpus_per_node": 0, "trainer.nnodes": 2}, {}),
    ({f"{ACTOR}.optim.clip_grad": 4.0, f"{ACTOR}.grad_clip": 5.0}, {"learner.clip_grad": 4.0}),
    (
        {f"{ACTOR}.clip_ratio_low": 0.0, f"{ACTOR}.clip_ratio_high": 0.0, f"{ACTOR}.clip_ratio": 0.1},
        {"learner.clip_ratio_low": 0.0, "learner.clip_ratio_high": 0.0},
    ),
    (
        {f"{ACTOR}.optim.lr_warmup_steps": 1, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.5},
        {"learner.lr_warmup_steps": 1},
    ),
    (
        {f"{ACTOR}.optim.lr_warmup_steps": 0, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.5},
        {"learner.lr_warmup_steps": 20},
    ),
    (
        {f"{ROLLOUT}.n": 2, f"{ACTOR}.ppo_mini_batch_size": 3, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 9},
        {"learner.mini_batch_size": 6, "learner.micro_batch_size": 6, "plan.rollouts": 2, "training.n": 2},
    ),
    ({"trainer.val_before_train": False, "trainer.val_only": True}, {"plan.total_steps": 0}),
    ({"trackway.device": "cuda", "trackway.dtype": "float32"}, {"learner.device": "cuda"}),
    (
        {f"{ROLLOUT}.trace.backend": ["mlflow"], f"{ROLLOUT}.trace.token2text": True, "data.train_batch_size": 512},
        {"trace.backends": ("mlflow",), "trace.token2text": True, "plan.traced_prompts": 512},
    ),
]
"""Keys that say something only beside another one, or go before it; and null where it is a value of its own."""

NOT_BY_KEY = {
    "learner.total_updates",
    "retry_policy.backoff_s",
    *("trace.mlflow_experiment_id", "trace.mlflow_run_id"),
    *asks(
        run=0, validation=0, trace_target=0, sampling__stop_token_ids=0, sampling__ignore_eos=0, sampling__logprobs=0
    ),
}
"""What follows from the run itself, or is the same in every run."""


def reached(config: RunConfig) -> Fields:
    """Every field of what the parts of a run take."""
    target = trace_target(config, "7", "r")
    parts: dict[str, Fields] = {
        "learner": asdict(learner_config(config, STEPS)),
        "plan": asdict(plan(config, STEPS_PER_EPOCH)),
        "trace": target.model_dump(),
        "training": dict(_template_fields(training_template(config, "run", target))),
        "validation": dict(_template_fields(validation_template(config, "run", target))),
        "retry_policy": asdict(retry_policy(config)),
        "sharing": asdict(sharing(config)),
    }
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def _template_fields(template: GroupTemplate) -> Iterator[tuple[str, object]]:
    for name, value in vars(template).items():
        match name:
            case "sampling_params":
                yield from ((f"sampling.{field}", inner) for field, inner in value.model_dump().items())
            case "limits":
                yield from ((f"limits.{field}", inner) for field, inner in value.model_dump().items())
            case "trace_target":
                yield name, "the run's own"
            case _:
                yield name, value


def changed(keys: Keys) -> Fields:
    """The fields that these keys change, with what they become."""
    before = reached(resolve({**GIVEN}))
    return {name: value for name, value in reached(resolve({**GIVEN, **keys})).items() if value != before[name]}


@pytest.mark.parametrize(("key", "value", "fields"), [(key, *row) for key, row in KEYS.items()], ids=list(KEYS))
def test_a_key_changes_its_own_fields_and_no_others(key: str, value: JsonValue, fields: Fields):
    assert changed({key: value}) == fields


@pytest.mark.parametrize(("keys", "fields"), TOGETHER)
def test_keys_that_belong_together_change_their_fields_and_no_others(keys: Keys, fields: Fields):
    assert changed(keys) == fields


def test_every_field_is_reached_by_a_key_or_is_the_same_in_every_run():
    by_key = {name for _, fields in [*KEYS.values(), *TOGETHER] for name in fields}

    assert set(reached(resolve({}))) - by_key == NOT_BY_KEY
    assert by_key & NOT_BY_KEY == set()


def test_the_keys_say_the_same_on_a_command_line():
    values: Keys = {key: value for key, (value, _) in KEYS.items()}

    config = compose([f"{key}={json.dumps(value)}" for key, value in values.items()])

    assert reached(config) == reached(resolve(values))


def test_what_follows_from_the_run_itself_is_passed_on():
    config = resolve({**GIVEN})
    target = trace_target(config, "7", "r")

    assert (target.mlflow_experiment_id, target.mlflow_run_id) == ("7", "r")
    assert learner_config(config, STEPS).total_updates == STEPS
    for make, is_validation in ((training_template, False), (validation_template, True)):
        template = make(config, "name", target)
        assert (template.run, template.validation, template.trace_target) == ("name", is_validation, target)


def test_the_throughput_of_a_run_without_gpus_is_divided_by_one():
    assert plan(resolve({}), STEPS_PER_EPOCH).gpus == 1


def test_without_a_model_the_path_is_empty_and_without_a_gpu_the_learner_has_float32_on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    learner = learner_config(resolve({}), STEPS)

    assert (learner.model_path, learner.device, learner.dtype) == ("", "cpu", "float32")


def test_with_a_gpu_the_learner_computes_there_in_bfloat16(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    learner = learner_config(resolve({}), STEPS)

    assert (learner.device, learner.dtype) == ("cuda", "bfloat16")
