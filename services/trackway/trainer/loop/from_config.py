"""Converts verl's configuration keys to the settings of a run's parts; nothing else knows both vocabularies.

It loads PyTorch only where a learner's settings need it: trials and evaluations take their templates from here.
"""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trackway.clients.weights import WeightStore
from trackway.learner.config import LearnerConfig
from trackway.learner.filtering import GroupFilter, OverlongPenalty
from trackway.learner.gpu_memory import with_advice
from trackway.run_config import RunConfig
from trackway.run_config.models import steps_between, weave_project
from trackway.system.process import Experimental
from trackway.trainer.loop.colocation import Sharing
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy
from trackway.trainer.loop.schedule import Schedule
from trackway.trainer.loop.scheduler import Pacing
from trackway.trainer.loop.session_groups import SessionLimits
from trackway.wire.agent import Limits
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import TraceTarget
from trackway.wire.weights import UpdateMode

if TYPE_CHECKING:
    from trackway.trainer.loop.base import Profiler

ANCHOR_EVERY = 8
"""Versions from one whole publication to the next in an object store: a new replica applies at most seven deltas."""


def learner_config(config: RunConfig, total_steps: int) -> LearnerConfig:
    """The learner's sections and settings over a run of `total_steps`.

    Raises TrackwayError for a device `auto` without the GPUs that the run or its process was given.
    """
    policy, own = config.actor_rollout_ref, config.trackway
    if config.is_supervised:  # no entropy is computed
        uncompiled = {f"actor.{name}": False for name in ("use_torch_compile", "fsdp_config.use_torch_compile")}
        policy = policy.with_values(uncompiled)
    device, dtype = _device(config), own.dtype
    if dtype == "auto" and policy.actor.fsdp_config.dtype in ("float32", "fp32"):
        dtype = "float32"
    elif dtype == "auto" and config.has_bfloat16_weights:
        dtype = "bfloat16"
    return LearnerConfig(
        model=policy.model,
        actor=policy.actor,
        rollout=policy.rollout,
        ref=policy.ref,
        algorithm=config.algorithm.with_values({"rollout_correction": config.correction}),
        critic=config.critic,
        critic_warmup=config.trainer.critic_warmup,
        total_steps=total_steps,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        dtype=_dtype(dtype, device),
        device=device,
        threads=own.threads,
        engine_threads=int(pacing(config).runs_ahead),
        seed=own.seed,
        proximal_logprobs=own.proximal_logprobs,
        save_token_values=own.save_token_values,
        float32_head=own.float32_head,
        distillation_loss=config.distillation.distillation_loss if config.distillation.enabled else None,
    )


def advise(error: Exception, config: RunConfig) -> None:
    """End the traceback of an OutOfMemoryError with the keys that help, and what was forecast."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        with_advice(error, learner_config(config, 0), config.placement)


def experimental(config: RunConfig, device: str) -> list[Experimental]:
    """Features of a learner on this device that never ran."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    used = {
        Experimental.GPU: True,
        Experimental.NCCL: config.placement.ranks > 1,
        Experimental.OFFLOAD: fsdp.param_offload or fsdp.optimizer_offload or fsdp.offload_policy,
        Experimental.IPC: config.trackway.weights_transport == "ipc",
    }
    return [] if device == "cpu" else [feature for feature, is_used in used.items() if is_used]


def plan(config: RunConfig, steps_per_epoch: int) -> Schedule:
    """The schedule of a run. `val_only` makes a run of no steps."""
    trainer = config.trainer
    return Schedule(
        total_steps=config.total_steps(steps_per_epoch),
        seed=config.trackway.seed,
        val_before_train=trainer.val_before_train or trainer.val_only,
        test_freq=steps_between(trainer.test_freq, steps_per_epoch),
        save_freq=steps_between(trainer.save_freq, steps_per_epoch),
        keep_checkpoints=trainer.max_actor_ckpt_to_keep,
        copies_url=trainer.default_hdfs_dir and trainer.default_hdfs_dir.rstrip("/"),
        async_save=config.actor_rollout_ref.actor.checkpoint.async_save,
        traced_prompts=config.traced_prompts,
        traced_validation=config.traced_validation,
        rollouts=config.group_size,
        validation_n=config.actor_rollout_ref.rollout.val_kwargs.n,
        max_staleness=config.trackway.max_staleness,
        max_prompt_length=config.data.max_prompt_length,
        storage_wait_s=config.trackway.storage_wait_s,
        gpus=max(1, (trainer.n_gpus_per_node or 0) * (trainer.nnodes or 1)),
    )


def pacing(config: RunConfig) -> Pacing:
    """Return how far generation runs ahead of the learner."""
    asynchronous, own = config.async_training, config.trackway
    depth, ahead = asynchronous.staleness_threshold, math.ceil(config.versions_ahead)
    return Pacing(
        batch_size=config.data.train_batch_size,
        depth=depth,
        bound=ahead + (own.over_sample_rate > 0) if own.max_staleness is None else own.max_staleness,
        drop=own.staleness_strategy == "drop",
        sync_every=asynchronous.trigger_parameter_sync_step,
        over_sample=own.over_sample_rate,
    )


def group_filter(config: RunConfig) -> GroupFilter | None:
    """The filter of groups without a difference; None trains all groups."""
    keys, data = config.algorithm.filter_groups, config.data
    if not keys.enable or keys.metric is None:
        return None
    batch = data.gen_batch_size or data.train_batch_size
    most = keys.max_num_gen_batches * batch if keys.max_num_gen_batches > 0 else None
    return GroupFilter(keys.metric, data.gen_batch_size or 1, most)


def overlong_penalty(config: RunConfig) -> OverlongPenalty | None:
    """The penalty on long responses, or None for none."""
    keys = config.reward.reward_kwargs
    buffer = keys.overlong_buffer_cfg
    if not buffer.enable:
        return None
    longest = keys.max_resp_len or config.data.max_response_length
    return OverlongPenalty(longest, buffer.len, buffer.penalty_factor, buffer.log)


def profiler(config: RunConfig, folder: Path) -> "Profiler | None":
    """The profiler of the updates, which writes below the run's folder by default, or None for none."""
    from trackway.trainer.loop.base import Profiler

    keys = config.global_profiler
    if keys.tool is None or not keys.steps:
        return None
    return Profiler(Path(keys.save_path) if keys.save_path else folder / "profile", frozenset(keys.steps))


def trace_target(config: RunConfig, experiment_id: str | None = None, run_id: str | None = None) -> TraceTarget:
    """Destination of the run's traces, given MLflow's ids when it is on. Raises TrackwayError without a Weave entity.

    Without a backend the services' own settings decide where traces go and whether spans carry text.
    """
    trace = config.actor_rollout_ref.rollout.trace
    return TraceTarget(
        backends=trace.backend,
        mlflow_experiment_id=experiment_id,
        mlflow_run_id=run_id,
        weave_project=weave_project(config),
        wandb_run_id=config.trackway.wandb_run_id,
        token2text=trace.token2text if trace.backend or trace.token2text else None,
    )


def training_template(config: RunConfig, run: str, target: TraceTarget) -> GroupTemplate:
    """The template of training groups."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    turns = rollout.multi_turn
    sampling = SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=data.max_response_length,
        seed=_sampling_seed(config),
    )
    limits = Limits(
        max_prompt_length=data.max_prompt_length,
        prompt_truncation=data.truncation,
        max_response_length=data.max_response_length,
        max_assistant_turns=turns.max_assistant_turns,
        max_user_turns=turns.max_user_turns,
        max_parallel_calls=turns.max_parallel_calls,
        on_bad_call=config.trackway.on_bad_call,
        max_tool_response_length=turns.max_tool_response_length,
        max_tool_response_tokens=config.trackway.max_tool_response_tokens,
        tool_response_truncate_side=turns.tool_response_truncate_side,
        timeout_s=config.trackway.trajectory_timeout_s,
    )
    return GroupTemplate(
        run=run,
        experiment_name=config.trace_experiment,
        n=rollout.n,
        sampling_params=sampling,
        limits=limits,
        default_agent=config.default_agent,
        tools=config.trackway.tools,
        trace_target=target,
    )


def validation_template(config: RunConfig, run: str, target: TraceTarget) -> GroupTemplate:
    """The template of validation groups; greedy unless `val_kwargs.do_sample`."""
    kwargs = config.actor_rollout_ref.rollout.val_kwargs
    sampling = SamplingParams(
        temperature=kwargs.temperature if kwargs.do_sample else 0.0,
        top_p=kwargs.top_p,
        top_k=kwargs.top_k,
        max_tokens=config.data.max_response_length,
        seed=_sampling_seed(config),
    )
    training = training_template(config, run, target)
    return replace(training, n=kwargs.n, sampling_params=sampling, validation=True)


def retry_policy(config: RunConfig) -> RetryPolicy:
    """The retry limits of group requests."""
    own = config.trackway
    return RetryPolicy(own.group_attempts, own.group_timeout_s, own.max_inflight_groups)


def validation_retry_policy(config: RunConfig) -> RetryPolicy:
    """The retry limits of a validation's group requests."""
    policy, most = retry_policy(config), config.data.val_batch_size
    return policy if most is None else replace(policy, max_inflight=min(most, policy.max_inflight))


def session_limits(config: RunConfig) -> SessionLimits:
    """The bounds of the sessions that wait for the run."""
    own = config.trackway
    return SessionLimits(own.group_timeout_s, own.session_max_age_s, own.max_waiting_sessions, own.max_staleness)


def sharing(config: RunConfig) -> Sharing:
    """Return how rollout engines give their GPU memory to the learner, if they do."""
    rollout = config.actor_rollout_ref.rollout
    staged = rollout.multi_stage_wake_up is not False
    return Sharing(rollout.free_cache_engine, staged, config.trackway.sleep_timeout_s, pacing(config).runs_ahead)


def update_mode(config: RunConfig) -> UpdateMode | None:
    """Treatment of generations in flight when new weights are loaded; None: as the rollout service does it."""
    partial = config.async_training.partial_rollout
    return None if partial is None else "abort" if partial else "wait"


def _sampling_seed(config: RunConfig) -> int:
    own = config.actor_rollout_ref.rollout.seed
    return config.trackway.seed if own is None else own


def anchor_every(config: RunConfig, store: WeightStore) -> int:
    """Number of published versions of which one is whole. 0 for all."""
    wanted = config.trackway.weights_anchor_every
    return wanted if wanted is not None else 0 if store.is_folder else ANCHOR_EVERY


def _device(config: RunConfig) -> str:
    if config.trackway.device != "auto":
        return config.trackway.device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    assigned = {
        "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node or "",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").removeprefix("-1"),
    }
    if given := [f"{name}={value}" for name, value in assigned.items() if value]:
        message = (
            f"trackway.device=auto: expected a GPU for {' and '.join(given)}, got none for torch {torch.__version__}"
        )
        remedy = "see `nvidia-smi` (CUDA 13 needs NVIDIA's driver 580 or newer), or set trackway.device=cpu"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; {remedy}")
    return "cpu"


def _dtype(wanted: str, device: str) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else "bfloat16"
