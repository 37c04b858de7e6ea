"""Where each key arrives: alone, with a value that is not its default, it changes these fields and no others."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from trackway.clients.weights import WeightStore
from trackway.learner.config import CriticSettings, LearnerConfig, LoraSettings, PolicySettings
from trackway.learner.ranks.balance import PassLimit
from trackway.run_config import RunConfig, compose, resolve
from trackway.run_config.algorithm import AlgorithmConfig, KlControlConfig
from trackway.run_config.distillation import DistillationLossConfig
from trackway.run_config.policy import (
    CheckpointContents,
    CriticOptimConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    PolicyLossConfig,
    RefOffloadConfig,
    ShardingConfig,
)
from trackway.run_config.rollout_correction import RolloutCorrectionConfig
from trackway.run_config.section import Section
from trackway.trainer.loop.from_config import (
    anchor_every,
    group_filter,
    learner_config,
    overlong_penalty,
    pacing,
    plan,
    profiler,
    retry_policy,
    sharing,
    trace_target,
    training_template,
    update_mode,
    validation_retry_policy,
    validation_template,
)
from trackway.trainer.loop.rollout_client import GroupTemplate
from trackway.wire.errors import TrackwayError

Keys = dict[str, JsonValue]
Fields = dict[str, object]
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
GIVEN: Keys = {"trackway.device": "cpu"}
STEPS, STEPS_PER_EPOCH = 40, 7
LIMITS = ("update_limit", "log_prob_limit", "ref_limit")


def asks(**changed: object) -> Fields:
    """The same fields of the training and the validation template; a dot is written `__`."""
    names = {name.replace("__", "."): value for name, value in changed.items()}
    return {f"{template}.{name}": value for template in ("training", "validation") for name, value in names.items()}


def passes(size: int) -> Fields:
    """The learner's passes that take the actor's micro-batch size."""
    return {f"learner.{name}.rows": size for name in LIMITS}


def fills(tokens: int) -> Fields:
    """The learner's passes that take the actor's tokens per micro-batch."""
    return {f"learner.{name}.tokens": tokens for name in LIMITS}


def retries(**changed: object) -> Fields:
    """The same limits of the requests in training and in validations."""
    return {
        f"{part}.{name}": value for part in ("retry_policy", "validation_policy") for name, value in changed.items()
    }


CORRECTED: Fields = {f"learner.{CORRECTION}.rollout_is": "token", "learner.uses_weights": True}
"""What a run sets whose rollouts may be of older weights."""

BYPASSED: Fields = {
    "learner.recompute_old_logprobs": False,
    "learner.loss_mode": "bypass_mode",
    f"learner.{CORRECTION}.bypass_mode": True,
}
"""What `bypass_mode` changes."""

SECTIONS = ("kl_ctrl", "filter_groups", "rollout_correction")
READ_AS_GIVEN = (
    "model.use_remove_padding",
    "model.enable_gradient_checkpointing",
    "model.use_fused_kernels",
    *(f"actor.optim.{name}" for name in ("lr", "betas", "weight_decay", "lr_scheduler_type", "min_lr_ratio")),
    *(f"actor.optim.{name}" for name in ("num_cycles", "zero_indexed_step")),
    *(f"actor.fsdp_config.{name}" for name in FSDPConfig.model_fields),
    *(f"actor.checkpoint.{name}" for name in CheckpointContents.model_fields),
    *(f"actor.{name}" for name in ("ppo_epochs", "shuffle", "clip_ratio_c", "loss_agg_mode", "entropy_coeff")),
    *(f"actor.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "tau_pos", "tau_neg")),
    "actor.calculate_sum_pi_squared",
    *(f"actor.policy_loss.{name}" for name in PolicyLossConfig.model_fields),
    *(f"ref.fsdp_config.{name}" for name in RefOffloadConfig.model_fields),
    "rollout.temperature",
    *(f"algorithm.{name}" for name in AlgorithmConfig.model_fields if name not in SECTIONS),
    *(f"algorithm.kl_ctrl.{name}" for name in KlControlConfig.model_fields),
    *(f"algorithm.rollout_correction.{name}" for name in RolloutCorrectionConfig.model_fields),
)
"""Keys that the learner reads from their sections; the properties of LearnerConfig are the others."""

KEYS: dict[str, tuple[JsonValue, Fields]] = {
    "data.max_prompt_length": (
        99,
        {"plan.max_prompt_length": 99, "learner.max_prompt_length": 99, **asks(limits__max_prompt_length=99)},
    ),
    "data.max_response_length": (
        98,
        {
            "learner.loss_scale_factor": 98.0,
            "learner.max_response_length": 98,
            **asks(limits__max_response_length=98, sampling__max_tokens=98),
        },
    ),
    "data.prompt_key": ("question", {"rows.columns": {"prompt": "question"}}),
    "data.reward_fn_key": ("scorer", {"rows.columns": {"data_source": "scorer"}}),
    "data.truncation": ("left", asks(limits__prompt_truncation="left")),
    "data.train_batch_size": (512, {"pacing.batch_size": 512}),
    "async_training.staleness_threshold": (
        1.5,
        {"pacing.depth": 1.5, "pacing.bound": 2, "sharing.runs_ahead": True, "learner.engine_threads": 1, **CORRECTED},
    ),
    "async_training.trigger_parameter_sync_step": (
        19,
        {"pacing.sync_every": 19, "sharing.runs_ahead": True, "learner.engine_threads": 1, **CORRECTED},
    ),
    **dict.fromkeys(
        ("trackway.over_sample_rate", f"{ROLLOUT}.over_sample_rate"),
        (
            0.2,
            {
                "pacing.over_sample": 0.2,
                "pacing.bound": 2,
                "sharing.runs_ahead": True,
                "learner.engine_threads": 1,
                **CORRECTED,
            },
        ),
    ),
    "async_training.partial_rollout": (False, {"publisher.update_mode": "wait"}),
    "data.val_batch_size": (7, {"validation_policy.max_inflight": 7}),
    "trackway.staleness_strategy": ("drop", {"pacing.drop": True}),
    f"{MODEL}.path": ("m", {"learner.model_path": "m"}),
    f"{MODEL}.use_remove_padding": (False, {"learner.model.use_remove_padding": False}),
    f"{MODEL}.enable_gradient_checkpointing": (False, {"learner.model.enable_gradient_checkpointing": False}),
    f"{MODEL}.override_config.max_position_embeddings": (4321, {"learner.max_positions": 4321}),
    f"{MODEL}.use_fused_kernels": (True, {"learner.model.use_fused_kernels": True}),
    f"{MODEL}.lora_rank": (
        8,
        {"learner.lora": LoraSettings(8, 16, "all-linear", None, 42), "learner.publishes_adapter": True},
    ),
    f"{MODEL}.lora.merge": (True, {}),
    f"{MODEL}.lora_alpha": (32, {}),
    f"{MODEL}.target_modules": (["q_proj"], {}),
    f"{MODEL}.exclude_modules": ("k_proj", {}),
    f"{ACTOR}.optim.lr": (0.5, {"learner.actor.optim.lr": 0.5}),
    f"{ACTOR}.optim.betas": ([0.1, 0.2], {"learner.actor.optim.betas": (0.1, 0.2)}),
    f"{ACTOR}.optim.weight_decay": (3.0, {"learner.actor.optim.weight_decay": 3.0}),
    f"{ACTOR}.optim.lr_warmup_steps": (3, {"learner.lr_warmup_steps": 3}),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": (0.15, {"learner.lr_warmup_steps": 6}),
    f"{ACTOR}.optim.lr_scheduler_type": ("cosine", {"learner.actor.optim.lr_scheduler_type": "cosine"}),
    f"{ACTOR}.optim.num_cycles": (1.5, {"learner.actor.optim.num_cycles": 1.5}),
    f"{ACTOR}.optim.zero_indexed_step": (False, {"learner.actor.optim.zero_indexed_step": False}),
    f"{ACTOR}.optim.min_lr_ratio": (0.25, {"learner.actor.optim.min_lr_ratio": 0.25}),
    f"{ACTOR}.optim.clip_grad": (4.0, {"learner.clip_grad": 4.0}),
    f"{ACTOR}.grad_clip": (5.0, {"learner.clip_grad": 5.0}),
    f"{ACTOR}.fsdp_config.param_offload": (True, {"learner.actor.fsdp_config.param_offload": True}),
    f"{ACTOR}.fsdp_config.optimizer_offload": (True, {"learner.actor.fsdp_config.optimizer_offload": True}),
    f"{ACTOR}.fsdp_config.offload_policy": (True, {"learner.actor.fsdp_config.offload_policy": True}),
    f"{ACTOR}.fsdp_config.reshard_after_forward": (False, {"learner.actor.fsdp_config.reshard_after_forward": False}),
    **{
        f"{section}.fsdp_config.mixed_precision.param_dtype": (
            "fp32",
            {f"learner.{name}.fsdp_config.mixed_precision": MixedPrecisionConfig(param_dtype="fp32")},
        )
        for section, name in ((ACTOR, "actor"), (REF, "ref"))
    },
    f"{ACTOR}.fsdp_config.fsdp_size": (2, {"learner.actor.fsdp_config.fsdp_size": 2}),
    f"{ACTOR}.fsdp_config.forward_prefetch": (True, {"learner.actor.fsdp_config.forward_prefetch": True}),
    f"{ACTOR}.fsdp_config.entropy_from_logits_chunk_size": (
        64,
        {"learner.actor.fsdp_config.entropy_from_logits_chunk_size": 64},
    ),
    f"{ACTOR}.use_torch_compile": (True, {"learner.compiles_entropy": True}),
    f"{ACTOR}.fsdp_config.use_torch_compile": (
        True,
        {"learner.actor.fsdp_config.use_torch_compile": True, "learner.compiles_entropy": True},
    ),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": (
        2,
        {"learner.actor.fsdp_config.ulysses_sequence_parallel_size": 2, "learner.sequence_parallel_size": 2},
    ),
    f"{ACTOR}.ulysses_sequence_parallel_size": (4, {"learner.sequence_parallel_size": 4}),
    f"{ACTOR}.fsdp_config.dtype": ("float32", {"learner.actor.fsdp_config.dtype": "float32"}),
    **{
        f"{section}.fsdp_config.model_dtype": (
            "bf16",
            {f"learner.{name}.fsdp_config.model_dtype": "bf16", "learner.dtype": "bfloat16"},
        )
        for section, name in ((ACTOR, "actor"), (REF, "ref"))
    },
    **{
        f"{section}.fsdp_config.full_determinism": (
            True,
            {f"learner.{name}.fsdp_config.full_determinism": True, "learner.is_deterministic": True},
        )
        for section, name in ((ACTOR, "actor"), (REF, "ref"))
    },
    f"{ACTOR}.fsdp_config.seed": (7, {"learner.actor.fsdp_config.seed": 7}),
    f"{ACTOR}.use_dynamic_bsz": (True, fills(16384)),
    f"{ACTOR}.ppo_max_token_len_per_gpu": (4096, {}),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": (
        True,
        {"learner.log_prob_limit.tokens": 16384, "learner.ref_limit.tokens": 16384},
    ),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": (4096, {}),
    f"{REF}.log_prob_use_dynamic_bsz": (True, {"learner.ref_limit.tokens": 16384}),
    f"{REF}.log_prob_max_token_len_per_gpu": (4096, {}),
    f"{ACTOR}.ppo_mini_batch_size": (32, {"learner.mini_batch_size": 32, **passes(32)}),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (4, passes(4)),
    f"{ACTOR}.ppo_epochs": (6, {"learner.actor.ppo_epochs": 6}),
    f"{ACTOR}.shuffle": (True, {"learner.actor.shuffle": True}),
    f"{ACTOR}.data_loader_seed": (6, {"learner.shuffle_seed": 6}),
    f"{ACTOR}.clip_ratio": (0.1, {"learner.clip_range": (0.1, 0.1)}),
    f"{ACTOR}.clip_ratio_low": (0.3, {"learner.clip_range": (0.3, 0.2)}),
    f"{ACTOR}.clip_ratio_high": (0.4, {"learner.clip_range": (0.2, 0.4)}),
    f"{ACTOR}.clip_ratio_c": (7.0, {"learner.actor.clip_ratio_c": 7.0}),
    f"{ACTOR}.policy_loss.dro_beta": (0.4, {"learner.actor.policy_loss.dro_beta": 0.4}),
    **{
        f"{ACTOR}.policy_loss.{name}": (value, {f"learner.actor.policy_loss.{name}": value})
        for name, value in (
            *(("clip_cov_ratio", 0.5), ("clip_cov_lb", 0.25), ("clip_cov_ub", 7.0)),
            *(("kl_cov_ratio", 0.75), ("ppo_kl_coef", 0.3)),
        )
    },
    f"{ACTOR}.tau_pos": (1.5, {"learner.actor.tau_pos": 1.5}),
    f"{ACTOR}.tau_neg": (2.5, {"learner.actor.tau_neg": 2.5}),
    f"{ACTOR}.loss_agg_mode": ("token-sum", {"learner.actor.loss_agg_mode": "token-sum"}),
    f"{ACTOR}.loss_scale_factor": (8.0, {"learner.loss_scale_factor": 8.0}),
    f"{ACTOR}.entropy_coeff": (0.9, {"learner.actor.entropy_coeff": 0.9, "learner.trains_entropy": True}),
    f"{ACTOR}.calculate_sum_pi_squared": (
        True,
        {"learner.actor.calculate_sum_pi_squared": True, "learner.measures_distribution": True},
    ),
    f"{ACTOR}.use_kl_loss": (True, {"learner.actor.use_kl_loss": True, "learner.uses_reference": True}),
    f"{ACTOR}.kl_loss_coef": (0.6, {"learner.actor.kl_loss_coef": 0.6}),
    f"{ACTOR}.kl_loss_type": ("k1", {"learner.actor.kl_loss_type": "k1"}),
    f"{REF}.log_prob_micro_batch_size_per_gpu": (9, {"learner.ref_limit.rows": 9}),
    f"{REF}.fsdp_config.param_offload": (True, {"learner.ref.fsdp_config.param_offload": True}),
    f"{ROLLOUT}.n": (
        8,
        {
            "learner.mini_batch_size": 2048,
            **passes(2048),
            "plan.rollouts": 8,
            "training.n": 8,
        },
    ),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (
        10,
        {"learner.log_prob_limit.rows": 10, "learner.ref_limit.rows": 10},
    ),
    f"{ROLLOUT}.temperature": (0.7, {"learner.rollout.temperature": 0.7, "training.sampling.temperature": 0.7}),
    f"{ROLLOUT}.top_p": (0.8, {"training.sampling.top_p": 0.8}),
    f"{ROLLOUT}.top_k": (11, {"training.sampling.top_k": 11}),
    f"{ROLLOUT}.seed": (8, asks(sampling__seed=8)),
    f"{ROLLOUT}.val_kwargs.n": (12, {"plan.validation_n": 12, "validation.n": 12}),
    f"{ROLLOUT}.val_kwargs.temperature": (0.6, {}),
    f"{ROLLOUT}.val_kwargs.top_p": (0.5, {"validation.sampling.top_p": 0.5}),
    f"{ROLLOUT}.val_kwargs.top_k": (13, {"validation.sampling.top_k": 13}),
    f"{ROLLOUT}.multi_turn.enable": (True, asks(default_agent="tool_agent")),
    f"{ROLLOUT}.agent.default_agent_loop": ("mine", asks(default_agent="mine")),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": (14, asks(limits__max_assistant_turns=14)),
    f"{ROLLOUT}.multi_turn.max_user_turns": (13, asks(limits__max_user_turns=13)),
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
    "algorithm.adv_estimator": (
        "optimal_token_baseline",
        {"learner.algorithm.adv_estimator": "optimal_token_baseline", "learner.measures_distribution": True},
    ),
    "algorithm.norm_adv_by_std_in_grpo": (False, {"learner.algorithm.norm_adv_by_std_in_grpo": False}),
    "algorithm.gamma": (0.5, {"learner.algorithm.gamma": 0.5}),
    "algorithm.lam": (0.5, {"learner.algorithm.lam": 0.5}),
    "algorithm.gdpo_reward_keys": (["acc"], {"learner.algorithm.gdpo_reward_keys": ["acc"]}),
    "algorithm.gdpo_reward_weights": ([2.0], {"learner.algorithm.gdpo_reward_weights": [2.0]}),
    "algorithm.use_kl_in_reward": (
        True,
        {"learner.algorithm.use_kl_in_reward": True, "learner.uses_reference": True},
    ),
    "algorithm.filter_groups.enable": (
        True,
        {"filter.metric": "reward", "filter.at_once": 1, "filter.max_prompts": None},
    ),
    "algorithm.kl_penalty": ("k3", {"learner.algorithm.kl_penalty": "k3"}),
    "algorithm.kl_ctrl.type": ("adaptive", {"learner.algorithm.kl_ctrl.type": "adaptive"}),
    "algorithm.kl_ctrl.kl_coef": (0.5, {"learner.algorithm.kl_ctrl.kl_coef": 0.5}),
    "algorithm.kl_ctrl.horizon": (7, {"learner.algorithm.kl_ctrl.horizon": 7}),
    "algorithm.kl_ctrl.target_kl": (0.3, {"learner.algorithm.kl_ctrl.target_kl": 0.3}),
    f"{CORRECTION}.rollout_is": ("token", {f"learner.{CORRECTION}.rollout_is": "token", "learner.uses_weights": True}),
    f"{CORRECTION}.rollout_is_threshold": ("0.5_5.0", {f"learner.{CORRECTION}.rollout_is_threshold": "0.5_5.0"}),
    f"{CORRECTION}.rollout_is_batch_normalize": (True, {f"learner.{CORRECTION}.rollout_is_batch_normalize": True}),
    f"{CORRECTION}.rollout_rs_threshold": ("0.9_2.0", {f"learner.{CORRECTION}.rollout_rs_threshold": "0.9_2.0"}),
    f"{CORRECTION}.bypass_mode": (
        True,
        {**BYPASSED},
    ),
    "trainer.project_name": ("me/runs", {"trace.weave_project": "me/runs"}),
    "trainer.experiment_name": ("mine", asks(experiment_name="mine")),
    "trainer.total_epochs": (2, {"plan.total_steps": 14}),
    "trainer.total_training_steps": (5, {"plan.total_steps": 5}),
    "trainer.save_freq": (18, {"plan.save_freq": 18}),
    "trackway.save_token_values": (True, {"learner.save_token_values": True}),
    "trainer.test_freq": (19, {"plan.test_freq": 19}),
    "trainer.val_before_train": (False, {"plan.val_before_train": False}),
    "trainer.val_only": (True, {"plan.total_steps": 0}),
    "trainer.max_actor_ckpt_to_keep": (20, {"plan.keep_checkpoints": 20}),
    "trainer.default_hdfs_dir": ("s3://b/copies/", {"plan.copies_url": "s3://b/copies"}),
    f"{ACTOR}.checkpoint.save_contents": (
        ["model", "extra"],
        {"learner.actor.checkpoint.save_contents": ("model", "extra")},
    ),
    f"{ACTOR}.checkpoint.load_contents": (["model"], {"learner.actor.checkpoint.load_contents": ("model",)}),
    f"{ACTOR}.checkpoint.async_save": (False, {"plan.async_save": False}),
    "trainer.nnodes": (2, {}),
    "trackway.seed": (5, {"learner.seed": 5, "learner.shuffle_seed": 5, "plan.seed": 5, **asks(sampling__seed=5)}),
    "trackway.device": ("cuda:1", {"learner.device": "cuda:1", "learner.dtype": "bfloat16"}),
    "trackway.dtype": ("bfloat16", {"learner.dtype": "bfloat16"}),
    "trackway.float32_head": (True, {"learner.float32_head": True}),
    "trackway.threads": (21, {"learner.threads": 21}),
    "trackway.max_inflight_groups": (22, retries(max_inflight=22)),
    "trackway.group_attempts": (23, retries(attempts=23)),
    "trackway.group_timeout_s": (24.0, retries(timeout_s=24.0)),
    "trackway.trajectory_timeout_s": (25.0, asks(limits__timeout_s=25.0)),
    "trackway.tools": (["search"], asks(tools=["search"])),
    "trackway.max_tool_response_tokens": (26, asks(limits__max_tool_response_tokens=26)),
    "trackway.on_bad_call": ("end", asks(limits__on_bad_call="end")),
    "trackway.trace_prompts_per_step": (27, {"plan.traced_prompts": 27}),
    "trackway.trace_validation_samples": (28, {"plan.traced_validation": 28}),
    "trainer.log_val_generations": (9, {"plan.traced_validation": 9}),
    "trackway.proximal_logprobs": (
        "loglinear",
        {"learner.proximal_logprobs": "loglinear", "learner.recompute_old_logprobs": False},
    ),
    "trackway.max_staleness": (29, {"plan.max_staleness": 29, "pacing.bound": 29}),
    "trackway.storage_wait_s": (30.0, {"plan.storage_wait_s": 30.0}),
    "trackway.sleep_timeout_s": (31.0, {"sharing.timeout_s": 31.0}),
    "trackway.weights_anchor_every": (0, {"publisher.anchor_every": 0}),
    "trackway.wandb_run_id": ("r1", {"trace.wandb_run_id": "r1"}),
}
"""Key -> a value for it, and the fields that it changes, each with what it becomes."""

VALUE_MODEL = CriticSettings(
    model=PolicySettings("", gradient_checkpointing=True, remove_padding=True, head_in_chunks=False),
    contents=CheckpointContents(),
    optim=CriticOptimConfig(),
    clip_grad=1.0,
    mini_batch_size=256,
    limit=PassLimit(256),
    forward_limit=PassLimit(256),
    epochs=1,
    shuffle=False,
    shuffle_seed=42,
    cliprange=0.5,
    loss_agg_mode="token-mean",
    loss_scale_factor=512.0,
)
"""Of a run with `adv_estimator=gae` and no key of `critic`."""
GAE: Fields = {"learner.algorithm.adv_estimator": "gae"}

TAUGHT: Keys = {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": "teacher"}
TOGETHER: list[tuple[Keys, Fields]] = [
    ({"algorithm.adv_estimator": "gae"}, {**GAE, "learner.value_model": VALUE_MODEL}),
    ({"critic.enable": True}, {"learner.value_model": VALUE_MODEL}),
    (
        {"critic.enable": True, "trainer.critic_warmup": 3},
        {"learner.value_model": VALUE_MODEL, "learner.critic_warmup": 3, "learner.updates_without_policy": 2},
    ),
    (
        {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 0.6},
        {"validation.sampling.temperature": 0.6},
    ),
    (TAUGHT, {"learner.distillation_loss": DistillationLossConfig()}),
    *(
        (
            {**TAUGHT, f"distillation.distillation_loss.{name}": value},
            {"learner.distillation_loss": DistillationLossConfig.model_validate({name: value})},
        )
        for name, value in (
            *(("loss_mode", "k2"), ("topk", 9), ("use_task_rewards", False), ("distillation_loss_coef", 0.5)),
            *(("loss_max_clamp", 2.0), ("log_prob_min_clamp", -3.0), ("use_policy_gradient", True)),
            *(("clip_ratio_low", 0.1), ("clip_ratio_high", 0.3)),
        )
    ),
    ({f"{ROLLOUT}.multi_turn.max_tool_response_length": None}, asks(limits__max_tool_response_length=None)),
    (
        {
            **{f"algorithm.filter_groups.{name}": value for name, value in (("enable", True), ("metric", "acc"))},
            "algorithm.filter_groups.max_num_gen_batches": 3,
        },
        {"filter.metric": "acc", "filter.at_once": 1, "filter.max_prompts": 3072},
    ),
    (
        {
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.max_num_gen_batches": 1,
            "data.gen_batch_size": 5,
        },
        {"filter.metric": "reward", "filter.at_once": 5, "filter.max_prompts": 5},
    ),
    ({"data.gen_batch_size": 5, "algorithm.filter_groups.metric": "acc"}, {}),
    (
        {f"{BUFFER}.enable": True, f"{BUFFER}.len": 9, f"{BUFFER}.penalty_factor": 0.5, f"{BUFFER}.log": True},
        {"overlong.max_length": 512, "overlong.buffer": 9, "overlong.factor": 0.5, "overlong.log": True},
    ),
    (
        {f"{BUFFER}.enable": True, f"{BUFFER}.len": 9, "reward.reward_kwargs.max_resp_len": 99},
        {"overlong.max_length": 99, "overlong.buffer": 9, "overlong.factor": 0.0, "overlong.log": False},
    ),
    (
        {"global_profiler.tool": "torch", "global_profiler.steps": [2, 4]},
        {"profiler.folder": Path("run/profile"), "profiler.steps": frozenset({2, 4})},
    ),
    (
        {"global_profiler.tool": "torch", "global_profiler.steps": [1], "global_profiler.save_path": "/p"},
        {"profiler.folder": Path("/p"), "profiler.steps": frozenset({1})},
    ),
    ({"global_profiler.steps": [2]}, {}),
    ({"trainer.n_gpus_per_node": 4, "trackway.device": "cpu"}, {"plan.gpus": 4}),
    ({"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2, "trackway.device": "cpu"}, {"plan.gpus": 8}),
    ({"trainer.n_gpus_per_node": 0, "trainer.nnodes": 2}, {}),
    (
        {
            **{f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_alpha": 4.5, f"{MODEL}.target_modules": "q|v"},
            f"{MODEL}.exclude_modules": ["k"],
        },
        {"learner.lora": LoraSettings(8, 4.5, "q|v", ["k"], 42), "learner.publishes_adapter": True},
    ),
    (
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_adapter_path": "a"},
        {"learner.lora": LoraSettings(8, 16, "all-linear", None, 42, "a"), "learner.publishes_adapter": True},
    ),
    (
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True},
        {"learner.lora": LoraSettings(8, 16, "all-linear", None, 42)},
    ),
    (
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"},
        {
            "learner.actor.use_kl_loss": True,
            "learner.actor.kl_loss_type": "full",
            "learner.uses_reference": True,
            "learner.uses_full_kl": True,
        },
    ),
    ({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096}, fills(4096)),
    (
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 8192},
        {**fills(8192), "learner.update_limit.tokens": 16384},
    ),
    (
        {f"{ACTOR}.use_dynamic_bsz": True, f"{REF}.log_prob_max_token_len_per_gpu": 8192},
        {**fills(16384), "learner.ref_limit.tokens": 8192},
    ),
    (
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False},
        {"learner.update_limit.tokens": 16384},
    ),
    (
        {f"{ACTOR}.use_dynamic_bsz": True, f"{REF}.log_prob_use_dynamic_bsz": False},
        {"learner.update_limit.tokens": 16384, "learner.log_prob_limit.tokens": 16384},
    ),
    ({f"{ACTOR}.optim.clip_grad": 4.0, f"{ACTOR}.grad_clip": 5.0}, {"learner.clip_grad": 4.0}),
    (
        {f"{ACTOR}.clip_ratio_low": 0.0, f"{ACTOR}.clip_ratio_high": 0.0, f"{ACTOR}.clip_ratio": 0.1},
        {"learner.clip_range": (0.0, 0.0)},
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
        {"learner.mini_batch_size": 6, **passes(6), "plan.rollouts": 2, "training.n": 2},
    ),
    ({"trainer.val_before_train": False, "trainer.val_only": True}, {"plan.total_steps": 0}),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
        {"learner.actor.policy_loss.loss_mode": "gspo", "learner.loss_mode": "gspo"},
    ),
    (
        {f"{CORRECTION}.rollout_rs": "token_k2", f"{CORRECTION}.rollout_rs_threshold": 3.0},
        {f"learner.{CORRECTION}.rollout_rs": "token_k2", f"learner.{CORRECTION}.rollout_rs_threshold": 3.0},
    ),
    (
        {
            f"{CORRECTION}.bypass_mode": True,
            f"{CORRECTION}.loss_type": "reinforce",
            f"{CORRECTION}.rollout_is": "token",
        },
        {
            **BYPASSED,
            "learner.uses_weights": True,
            f"learner.{CORRECTION}.loss_type": "reinforce",
            f"learner.{CORRECTION}.rollout_is": "token",
        },
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"},
        {
            **BYPASSED,
            f"learner.{CORRECTION}.loss_type": "reinforce",
        },
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"},
        {
            **BYPASSED,
            f"learner.{CORRECTION}.rollout_is": "token",
        },
    ),
    ({"trackway.device": "cuda", "trackway.dtype": "float32"}, {"learner.device": "cuda"}),
    (
        {"trackway.device": "cuda", f"{ACTOR}.fsdp_config.dtype": "fp32"},
        {"learner.device": "cuda", "learner.actor.fsdp_config.dtype": "fp32"},
    ),
    ({"trackway.max_inflight_groups": 22, "data.val_batch_size": 99}, retries(max_inflight=22)),
    (
        {"trackway.seed": 5, f"{ROLLOUT}.seed": 42},
        {"learner.seed": 5, "learner.shuffle_seed": 5, "plan.seed": 5},
    ),
    ({"trainer.log_val_generations": 3}, {}),
    (
        {f"{ROLLOUT}.trace.backend": ["mlflow"], f"{ROLLOUT}.trace.token2text": True, "data.train_batch_size": 512},
        {"trace.backends": ("mlflow",), "trace.token2text": True, "plan.traced_prompts": 512, "pacing.batch_size": 512},
    ),
]
"""Keys that say something only beside another one, or go before it; and null where it is a value of its own."""

NOT_BY_KEY = {
    "learner.total_steps",
    *("retry_policy.backoff_s", "validation_policy.backoff_s"),
    *("trace.mlflow_experiment_id", "trace.mlflow_run_id"),
    *asks(
        run=0,
        validation=0,
        policy=0,
        teachers=0,
        trace_target=0,
        sampling__stop_token_ids=0,
        sampling__ignore_eos=0,
        sampling__logprobs=0,
    ),
}
"""What follows from the run itself, or is the same in every run."""


def reached(config: RunConfig) -> Fields:
    """Every field of what the parts of a run take."""
    target = trace_target(config, "7", "r")
    filtering, overlong = group_filter(config), overlong_penalty(config)
    profiling = profiler(config, Path("run"))
    parts: dict[str, Fields] = {
        "overlong": {} if overlong is None else asdict(overlong),
        "rows": {"columns": config.data.columns},
        "profiler": {} if profiling is None else asdict(profiling),
        "filter": {} if filtering is None else asdict(filtering),
        "learner": dict(_learner_fields(learner_config(config, STEPS))),
        "plan": asdict(plan(config, STEPS_PER_EPOCH)),
        "trace": target.model_dump(),
        "training": dict(_template_fields(training_template(config, "run", target))),
        "validation": dict(_template_fields(validation_template(config, "run", target))),
        "retry_policy": asdict(retry_policy(config)),
        "validation_policy": asdict(validation_retry_policy(config)),
        "sharing": asdict(sharing(config)),
        "publisher": {
            "update_mode": update_mode(config),
            "anchor_every": anchor_every(config, WeightStore("memory://store")),
        },
        "pacing": asdict(pacing(config)),
    }
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def _learner_fields(learner: LearnerConfig) -> Iterator[tuple[str, object]]:
    for name, value in vars(learner).items():
        if not isinstance(value, Section) or name == "distillation_loss":  # None without teachers
            yield name, value
    for name, value in vars(LearnerConfig).items():
        if name in LIMITS:
            yield from ((f"{name}.{field}", inner) for field, inner in getattr(learner, name)._asdict().items())
        elif isinstance(value, property):
            yield name, getattr(learner, name)
    yield "lr_warmup_steps", learner.actor.optim.warmup_updates(learner.total_steps)
    for name in READ_AS_GIVEN:
        yield name, attrgetter(name)(learner)


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
    before, after = reached(resolve({**GIVEN})), reached(resolve({**GIVEN, **keys}))
    return {name: value for name, value in after.items() if name not in before or value != before[name]}


@pytest.mark.parametrize(("key", "value", "fields"), [(key, *row) for key, row in KEYS.items()], ids=list(KEYS))
def test_a_key_changes_its_own_fields_and_no_others(key: str, value: JsonValue, fields: Fields):
    assert changed({key: value}) == fields


_CRITIC_OPTIM: Keys = {
    **{"lr_warmup_steps": 7, "lr_warmup_steps_ratio": 0.25, "betas": [0.5, 0.75], "min_lr_ratio": 0.5},
    **{"num_cycles": 2.0, "lr_scheduler_type": "cosine", "zero_indexed_step": False},
}
_CRITIC_FSDP: Keys = {"optimizer_offload": True, "offload_policy": True, "reshard_after_forward": False}
_CRITIC_FSDP |= {
    "fsdp_size": 2,
    "mixed_precision": {"param_dtype": "fp32"},
    "forward_prefetch": True,
    "model_dtype": "bf16",
    "full_determinism": True,
}
OF_VALUE_MODEL: list[tuple[Keys, Fields]] = [
    ({f"{MODEL}.path": "m"}, {"path": "m"}),
    ({f"{MODEL}.path": "m", "critic.model.path": "v"}, {"path": "v"}),
    ({"critic.model.override_config.max_position_embeddings": 4321}, {"max_positions": 4321}),
    ({"critic.model.use_remove_padding": False}, {"remove_padding": False}),
    ({"critic.model.enable_gradient_checkpointing": False}, {"gradient_checkpointing": False}),
    ({"critic.checkpoint.load_contents": ["model"]}, {"contents": CheckpointContents(load_contents=("model",))}),
    (
        {"critic.checkpoint.save_contents": ["model", "extra"]},
        {"contents": CheckpointContents(save_contents=("model", "extra"))},
    ),
    ({"critic.optim.lr": 0.5}, {"optim": CriticOptimConfig(lr=0.5)}),
    *(
        ({f"critic.optim.{name}": value}, {"optim": CriticOptimConfig.model_validate({name: value})})
        for name, value in _CRITIC_OPTIM.items()
    ),
    *(
        (
            {f"critic.fsdp.{name}": value},
            {
                "sharding": ShardingConfig.model_validate({name: value}),
                "dtype": "bfloat16" if name == "model_dtype" else "float32",
            },
        )
        for name, value in _CRITIC_FSDP.items()
    ),
    ({"critic.optim.warmup_style": "cosine"}, {"optim": CriticOptimConfig(lr_scheduler_type="cosine")}),
    ({"critic.optim.clip_grad": 4.0}, {"optim": CriticOptimConfig(clip_grad=4.0), "clip_grad": 4.0}),
    ({"critic.grad_clip": 5.0}, {"clip_grad": 5.0}),
    (
        {"critic.model.fsdp_config.model_dtype": "bf16"},
        {"sharding": ShardingConfig(model_dtype="bf16"), "dtype": "bfloat16"},
    ),
    (
        {"critic.model.lora_rank": 8},
        {"lora": LoraSettings(8, 16, "all-linear", None, 42, trains_head=True)},
    ),
    (
        {
            **{"critic.model.lora_rank": 4, "critic.model.lora_alpha": 2.5},
            **{"critic.model.target_modules": "q|v", "critic.model.exclude_modules": ["k"]},
        },
        {"lora": LoraSettings(4, 2.5, "q|v", ["k"], 42, trains_head=True)},
    ),
    ({"critic.optim.weight_decay": 0.5}, {"optim": CriticOptimConfig(weight_decay=0.5)}),
    ({"critic.fsdp.param_offload": True}, {"sharding": ShardingConfig(param_offload=True)}),
    ({"critic.model.fsdp_config.optimizer_offload": True}, {"sharding": ShardingConfig(optimizer_offload=True)}),
    ({"critic.model.fsdp_config.param_offload": None}, {}),
    ({f"{ROLLOUT}.n": 2}, {"mini_batch_size": 512, "limit": PassLimit(512), "forward_limit": PassLimit(512)}),
    (
        {"critic.ppo_mini_batch_size": 8, f"{ROLLOUT}.n": 2, f"{ACTOR}.ppo_mini_batch_size": 4},
        {"mini_batch_size": 16, "limit": PassLimit(16), "forward_limit": PassLimit(16)},
    ),
    ({"critic.ppo_micro_batch_size_per_gpu": 3}, {"limit": PassLimit(3), "forward_limit": PassLimit(3)}),
    ({"critic.ppo_micro_batch_size_per_gpu": 999}, {}),
    ({"critic.forward_micro_batch_size_per_gpu": 5}, {"forward_limit": PassLimit(5)}),
    ({"critic.ppo_infer_micro_batch_size_per_gpu": 5}, {"forward_limit": PassLimit(5)}),
    (
        {f"{ACTOR}.use_dynamic_bsz": True},
        {"limit": PassLimit(256, 32768), "forward_limit": PassLimit(256, 32768)},
    ),
    ({f"{ACTOR}.use_dynamic_bsz": True, "critic.use_dynamic_bsz": False}, {}),
    (
        {"critic.use_dynamic_bsz": True, "critic.ppo_max_token_len_per_gpu": 64},
        {"limit": PassLimit(256, 64), "forward_limit": PassLimit(256, 64)},
    ),
    (
        {"critic.use_dynamic_bsz": True, "critic.forward_max_token_len_per_gpu": 64},
        {"limit": PassLimit(256, 32768), "forward_limit": PassLimit(256, 64)},
    ),
    ({f"{ACTOR}.ppo_epochs": 3}, {"epochs": 3}),
    ({f"{ACTOR}.ppo_epochs": 3, "critic.ppo_epochs": 2}, {"epochs": 2}),
    ({f"{ACTOR}.shuffle": True}, {"shuffle": True}),
    ({f"{ACTOR}.shuffle": True, "critic.shuffle": False}, {}),
    ({f"{ACTOR}.data_loader_seed": 6}, {"shuffle_seed": 6}),
    ({f"{ACTOR}.data_loader_seed": 6, "critic.data_loader_seed": 7}, {"shuffle_seed": 7}),
    ({"critic.cliprange_value": 0.1}, {"cliprange": 0.1}),
    ({f"{ACTOR}.loss_agg_mode": "token-sum"}, {"loss_agg_mode": "token-sum"}),
    ({f"{ACTOR}.loss_agg_mode": "token-sum", "critic.loss_agg_mode": "token-mean"}, {}),
    ({f"{ACTOR}.loss_scale_factor": 9.0}, {"loss_scale_factor": 9.0}),
    ({"critic.loss_scale_factor": 7.0}, {"loss_scale_factor": 7.0}),
]
"""Keys beside `adv_estimator=gae`, and what they change in the settings of the value model."""


@pytest.mark.parametrize(("keys", "fields"), OF_VALUE_MODEL)
def test_a_key_changes_its_own_settings_of_the_value_model_and_no_others(keys: Keys, fields: Fields):
    settings = learner_config(resolve({**GIVEN, "algorithm.adv_estimator": "gae", **keys}), STEPS).value_model

    model = {name: value for name, value in fields.items() if name in PolicySettings._fields}
    others = {name: value for name, value in fields.items() if name not in model}
    assert settings == VALUE_MODEL._replace(model=VALUE_MODEL.model._replace(**model), **others)


@pytest.mark.parametrize(("keys", "fields"), TOGETHER)
def test_keys_that_belong_together_change_their_fields_and_no_others(keys: Keys, fields: Fields):
    assert changed(keys) == fields


def test_every_field_is_reached_by_a_key_or_is_the_same_in_every_run():
    by_key = {name for _, fields in [*KEYS.values(), *TOGETHER] for name in fields}

    assert set(reached(resolve({}))) - by_key == NOT_BY_KEY
    assert by_key & NOT_BY_KEY == set()


def test_the_keys_say_the_same_on_a_command_line():
    contradict = ("trackway.proximal_logprobs", "trainer.nnodes")  # bypass_mode, and one GPU as the device
    values: Keys = {key: value for key, (value, _) in KEYS.items() if key not in contradict}

    config = compose([f"{key}={json.dumps(value)}" for key, value in values.items()])

    assert reached(config) == reached(resolve(values))


def test_what_follows_from_the_run_itself_is_passed_on():
    config = resolve({**GIVEN})
    target = trace_target(config, "7", "r")

    assert (target.mlflow_experiment_id, target.mlflow_run_id) == ("7", "r")
    assert learner_config(config, STEPS).total_steps == STEPS
    for make, is_validation in ((training_template, False), (validation_template, True)):
        template = make(config, "name", target)
        assert (template.run, template.validation, template.trace_target) == ("name", is_validation, target)


def test_the_throughput_of_a_run_without_gpus_is_divided_by_one():
    assert plan(resolve({}), STEPS_PER_EPOCH).gpus == 1


def test_without_a_model_the_path_is_empty_and_without_a_gpu_the_learner_has_float32_on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    learner = learner_config(resolve({}), STEPS)

    assert (learner.model_path, learner.device, learner.dtype) == ("", "cpu", "float32")


@pytest.mark.parametrize(
    ("gpus", "visible", "given"),
    [(8, "-1", "trainer.n_gpus_per_node=8"), (0, "GPU-5f", "CUDA_VISIBLE_DEVICES=GPU-5f"), (None, "", "")],
)
def test_a_cpu_is_refused_where_gpus_were_assigned(monkeypatch, gpus: int | None, visible: str, given: str):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = resolve({"trainer.n_gpus_per_node": gpus})
    if not given:
        assert learner_config(config, STEPS).device == "cpu"
        return

    with pytest.raises(TrackwayError) as refused:
        learner_config(config, STEPS)

    assert refused.value.message == (
        f"trackway.device=auto: expected a GPU for {given}, got none for torch {torch.__version__}; see `nvidia-smi` "
        "(CUDA 13 needs NVIDIA's driver 580 or newer), or set trackway.device=cpu"
    )


def test_with_a_gpu_the_learner_computes_there_in_bfloat16(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    learner = learner_config(resolve({}), STEPS)

    assert (learner.device, learner.dtype) == ("cuda", "bfloat16")


def test_supervised_training_compiles_no_entropy():
    words = ["engine.use_torch_compile=true", "trackway.device=cpu"]

    assert not learner_config(compose(words, config_name="sft"), 1).compiles_entropy
