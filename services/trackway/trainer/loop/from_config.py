"""Converts verl's configuration keys to the settings of a run's parts; nothing else knows both vocabularies."""

from dataclasses import replace

import torch

from trackway.trainer.config import RunConfig
from trackway.trainer.config.policy import OptimConfig
from trackway.trainer.config.weave_project import weave_project
from trackway.trainer.learner.config import LearnerConfig
from trackway.trainer.loop.colocation import Sharing
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy
from trackway.trainer.loop.schedule import Schedule
from trackway.wire.agent import Limits
from trackway.wire.rollout import SamplingParams
from trackway.wire.tracing import TraceTarget


def learner_config(config: RunConfig, total_steps: int) -> LearnerConfig:
    """The learner's settings over a run of `total_steps`; verl counts prompts where the learner counts trajectories."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    device = _device(config.trackway.device)
    mini_batch = actor.ppo_mini_batch_size * rollout.n
    return LearnerConfig(
        model_path=model.path or "",
        lr=actor.optim.lr,
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
        lr_warmup_steps=_warm_up(actor.optim, total_steps),
        lr_scheduler_type=actor.optim.lr_scheduler_type,
        total_updates=total_steps,
        min_lr_ratio=actor.optim.min_lr_ratio,
        clip_grad=actor.optim.clip_grad or actor.grad_clip,
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
        entropy_coeff=actor.entropy_coeff,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        ppo_epochs=actor.ppo_epochs,
        mini_batch_size=mini_batch,
        micro_batch_size=min(mini_batch, actor.ppo_micro_batch_size_per_gpu or mini_batch),
        log_prob_micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
        ref_micro_batch_size=ref.log_prob_micro_batch_size_per_gpu,
        remove_padding=model.use_remove_padding,
        param_offload=actor.fsdp_config.param_offload,
        optimizer_offload=actor.fsdp_config.optimizer_offload,
        ref_param_offload=ref.fsdp_config.param_offload,
        temperature=rollout.temperature,
        shuffle=actor.shuffle,
        recompute_old_logprobs=not config.algorithm.rollout_correction.bypass_mode,
        norm_adv_by_std=config.algorithm.norm_adv_by_std_in_grpo,
        dtype=_dtype(config.trackway.dtype, device),
        device=device,
        threads=config.trackway.threads,
        seed=config.trackway.seed,
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )


def _warm_up(optim: OptimConfig, total_steps: int) -> int:
    return optim.lr_warmup_steps if optim.lr_warmup_steps > 0 else int(optim.lr_warmup_steps_ratio * total_steps)


def plan(config: RunConfig, steps_per_epoch: int) -> Schedule:
    """The schedule of a run; `val_only` makes a run of no steps."""
    trainer = config.trainer
    return Schedule(
        total_steps=config.total_steps(steps_per_epoch),
        seed=config.trackway.seed,
        val_before_train=trainer.val_before_train or trainer.val_only,
        test_freq=trainer.test_freq,
        save_freq=trainer.save_freq,
        keep_checkpoints=trainer.max_actor_ckpt_to_keep,
        traced_prompts=config.traced_prompts,
        traced_validation=config.trackway.trace_validation_samples,
        rollouts=config.actor_rollout_ref.rollout.n,
        validation_n=config.actor_rollout_ref.rollout.val_kwargs.n,
        max_staleness=config.trackway.max_staleness,
        max_prompt_length=config.data.max_prompt_length,
        storage_wait_s=config.trackway.storage_wait_s,
        gpus=max(1, (trainer.n_gpus_per_node or 0) * (trainer.nnodes or 1)),
    )


def trace_target(config: RunConfig, experiment_id: str | None = None, run_id: str | None = None) -> TraceTarget:
    """Where the run's traces go, given MLflow's ids when it is on. Raises TrackwayError without a Weave entity.

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
        seed=config.trackway.seed,
    )
    limits = Limits(
        max_prompt_length=data.max_prompt_length,
        prompt_truncation=data.truncation,
        max_response_length=data.max_response_length,
        max_assistant_turns=turns.max_assistant_turns,
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
        seed=config.trackway.seed,
    )
    training = training_template(config, run, target)
    return replace(training, n=kwargs.n, sampling_params=sampling, validation=True)


def retry_policy(config: RunConfig) -> RetryPolicy:
    """The retry limits of group requests."""
    own = config.trackway
    return RetryPolicy(own.group_attempts, own.group_timeout_s, own.max_inflight_groups)


def sharing(config: RunConfig) -> Sharing:
    """Whether and how rollout engines give their GPU memory to the learner."""
    rollout = config.actor_rollout_ref.rollout
    staged = rollout.multi_stage_wake_up is not False
    return Sharing(rollout.free_cache_engine, staged, config.trackway.sleep_timeout_s)


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(wanted: str, device: str) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else "bfloat16"
