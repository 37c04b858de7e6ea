"""The configuration of a learner under test, made from a run's keys."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.run_config import resolve
from trackway.run_config.policy import OptimConfig, PolicyLossConfig
from trackway.run_config.rollout_correction import RolloutCorrectionConfig
from trackway.trainer.loop.from_config import learner_config as of_run

POLICY, ACTOR = "actor_rollout_ref", "actor_rollout_ref.actor"
KEYS = {
    "mini_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "micro_batch_size": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "log_prob_micro_batch_size": f"{POLICY}.rollout.log_prob_micro_batch_size_per_gpu",
    "ref_micro_batch_size": f"{POLICY}.ref.log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": f"{POLICY}.rollout.log_prob_use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": f"{POLICY}.rollout.log_prob_max_token_len_per_gpu",
    "ref_use_dynamic_bsz": f"{POLICY}.ref.log_prob_use_dynamic_bsz",
    "ref_max_token_len_per_gpu": f"{POLICY}.ref.log_prob_max_token_len_per_gpu",
    "reshard_after_forward": f"{ACTOR}.fsdp_config.reshard_after_forward",
    "forward_prefetch": f"{ACTOR}.fsdp_config.forward_prefetch",
    "fsdp_size": f"{ACTOR}.fsdp_config.fsdp_size",
    "offload_policy": f"{ACTOR}.fsdp_config.offload_policy",
    "ulysses_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "use_fused_kernels": f"{POLICY}.model.use_fused_kernels",
    "chunk_size": f"{ACTOR}.fsdp_config.entropy_from_logits_chunk_size",
    "temperature": f"{POLICY}.rollout.temperature",
    "remove_padding": f"{POLICY}.model.use_remove_padding",
    "gradient_checkpointing": f"{POLICY}.model.enable_gradient_checkpointing",
    **{
        name: f"{POLICY}.model.{name}"
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
    },
    "param_offload": f"{ACTOR}.fsdp_config.param_offload",
    "optimizer_offload": f"{ACTOR}.fsdp_config.optimizer_offload",
    "ref_param_offload": f"{POLICY}.ref.fsdp_config.param_offload",
    **{name: f"algorithm.rollout_correction.{name}" for name in RolloutCorrectionConfig.model_fields},
    **{name: f"{ACTOR}.policy_loss.{name}" for name in PolicyLossConfig.model_fields},
    "proximal_logprobs": "trackway.proximal_logprobs",
    "seed": "trackway.seed",
    "float32_head": "trackway.float32_head",
}
SIMPLE = {
    "bypass_mode": True,
    "remove_padding": False,
    "gradient_checkpointing": False,
    "critic.model.use_remove_padding": False,
    "critic.model.enable_gradient_checkpointing": False,
    "loss_scale_factor": 1.0,
    "seed": 0,
}


def learner_config(model: Path | str, **settings: Any) -> LearnerConfig:
    """Settings by a field of LearnerConfig, a name of KEYS, or the last part of a key of `actor` or `actor.optim`.

    Those not given are SIMPLE's, and float32 on a CPU, or on the device that `make gpu-check` names.

    float64, which no run may ask for, makes results comparable to ten digits.
    """
    fields = {name: settings.pop(name) for name in ("dtype", "device", "total_steps") if name in settings}
    keys = {_key(name): value for name, value in (SIMPLE | settings).items()}
    config = of_run(resolve({f"{POLICY}.model.path": str(model), **keys}), total_steps=0)
    return replace(config, **{"dtype": "float32", "device": os.environ.get("TRACKWAY_TEST_DEVICE", "cpu"), **fields})


def logprobs_of(learner: Learner, token_ids: Sequence[int] = range(3, 19)) -> list[float]:
    """The policy's logprobs of tokens 1..n-1 as it computes them in training, equal for equal weights."""
    with learner.policy.inference():
        return learner.policy._logprobs([list(token_ids)])[0]


def _key(name: str) -> str:
    if name.startswith("checkpoint."):
        return f"{ACTOR}.{name}"
    if "." in name:
        return name
    section = f"{ACTOR}.optim" if name in OptimConfig.model_fields else ACTOR
    return KEYS.get(name, f"{section}.{name}")
