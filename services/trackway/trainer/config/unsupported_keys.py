"""verl's keys that are accepted without effect, each with the reason, and verl's renamed keys.

A name that ends in `.*` covers all keys below it. The table lets a pasted verl command line run. The keys without
effect that were given are logged once at the start.
"""

from collections.abc import Iterable

_DEPLOYED = "engines, replicas and GPUs belong to the rollout service's deployment (deploy/*.yaml)"
_SHARDING = "the learner is one process; nothing is sharded"
_ACTOR_MICRO = "actor.ppo_micro_batch_size_per_gpu counts the trajectories of a pass"
_MICRO = "rollout.log_prob_micro_batch_size_per_gpu counts the trajectories of a pass"
_REF_MICRO = "ref.log_prob_micro_batch_size_per_gpu counts the trajectories of a pass"
_NO_CRITIC = "no estimator here has a critic"
_ONLY_GAE = "only gae uses it, which needs a critic"
_REWARD = "scorers belong to the reward service's deployment"
_TOOLS = "tools belong to the tools service's deployment"
_DUMPS = "every step's trajectories are written to outputs/<run>/trajectories"
_AGENT = "the agent service's deployment decides"
_FSDP = (
    *("wrap_policy.*", "reshard_after_forward", "fsdp_size", "forward_prefetch", "offload_policy", "model_dtype"),
    *("dtype", "use_orig_params", "mixed_precision.*", "strategy", "entropy_from_logits_with_chunking"),
)
"""Keys below `fsdp_config`."""

NO_EFFECT: dict[str, str] = {
    "data.return_raw_chat": "rows always keep their messages",
    "data.return_raw_input_ids": "rows always keep their messages",
    "data.return_full_prompt": "rows always keep their messages",
    "data.prompt_key": "rows have verl's schema: the prompt is `prompt`",
    "data.reward_fn_key": "rows have verl's schema: the scorer is found by `data_source`",
    "data.val_batch_size": "validation is bounded by trackway.max_inflight_groups",
    "data.dataloader_num_workers": "rows are held in memory",
    "data.filter_overlong_prompts_workers": "rows are held in memory",
    "data.validation_shuffle": "validation averages over all rows",
    "data.tool_config_path": _TOOLS,
    "data.trust_remote_code": "models are loaded without remote code",
    "actor_rollout_ref.hybrid_engine": "learner and rollout replicas are separate processes",
    "actor_rollout_ref.model.use_shm": "weights are pulled from the weight store",
    "actor_rollout_ref.model.trust_remote_code": "models are loaded without remote code",
    "actor_rollout_ref.model.enable_activation_offload": _SHARDING,
    "actor_rollout_ref.model.use_fused_kernels": "the loss is computed by PyTorch",
    "actor_rollout_ref.actor.strategy": _SHARDING,
    **{f"actor_rollout_ref.actor.fsdp_config.{name}": _SHARDING for name in _FSDP},
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _SHARDING,
    "actor_rollout_ref.actor.use_dynamic_bsz": _ACTOR_MICRO,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _ACTOR_MICRO,
    "actor_rollout_ref.actor.use_torch_compile": "the learner runs eagerly",
    "actor_rollout_ref.actor.calculate_entropy": "the entropy is always computed and logged",
    "actor_rollout_ref.actor.data_loader_seed": "trackway.seed is the seed of the learner",
    "actor_rollout_ref.actor.checkpoint.*": "a checkpoint always holds model, optimiser and random state",
    "actor_rollout_ref.actor.optim.total_training_steps": "a schedule spans the run's own steps",
    "actor_rollout_ref.actor.optim.num_cycles": "the cosine is half a wave",
    "actor_rollout_ref.rollout.data_parallel_size": _DEPLOYED,
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": _DEPLOYED,
    "actor_rollout_ref.rollout.max_num_batched_tokens": _DEPLOYED,
    "actor_rollout_ref.rollout.enable_chunked_prefill": _DEPLOYED,
    "actor_rollout_ref.rollout.load_format": _DEPLOYED,
    "actor_rollout_ref.rollout.layered_summon": "weights are pulled from the weight store",
    "actor_rollout_ref.rollout.nnodes": _DEPLOYED,
    "actor_rollout_ref.rollout.n_gpus_per_node": _DEPLOYED,
    "actor_rollout_ref.rollout.disable_log_stats": _DEPLOYED,
    "actor_rollout_ref.rollout.engine_kwargs.*": _DEPLOYED,
    "actor_rollout_ref.rollout.checkpoint_engine.*": "weights are pulled from the weight store",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "weights are pulled from the weight store",
    "actor_rollout_ref.rollout.prometheus.*": "every service serves /metrics",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "rollouts are always token ids in, token ids out",
    "actor_rollout_ref.rollout.calculate_log_probs": "rollouts always come with their logprobs",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length is the bound",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length is the bound",
    "actor_rollout_ref.rollout.do_sample": "training always samples",
    "actor_rollout_ref.rollout.over_sample_rate": "exactly rollout.n rollouts are requested",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _MICRO,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _MICRO,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _MICRO,
    "actor_rollout_ref.rollout.agent.num_workers": _AGENT,
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "multi_turn.max_assistant_turns bounds observations too",
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": "sampled ids are never tokenised again",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "sampled ids are never tokenised again",
    "actor_rollout_ref.ref.strategy": _SHARDING,
    "actor_rollout_ref.ref.use_torch_compile": "the learner runs eagerly",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": _SHARDING,
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _REF_MICRO,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _REF_MICRO,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _REF_MICRO,
    **{f"actor_rollout_ref.ref.fsdp_config.{name}": _SHARDING for name in _FSDP},
    "algorithm.lam": _ONLY_GAE,
    "algorithm.filter_groups.max_inflight_gen_batches": "trackway.max_inflight_groups bounds concurrent prompts",
    "algorithm.use_pf_ppo": _ONLY_GAE,
    "algorithm.pf_ppo.*": _ONLY_GAE,
    "async_training.partial_rollout": "the rollout service's update_mode decides: keep, wait or abort",
    "async_training.use_rollout_log_probs": "algorithm.rollout_correction.bypass_mode decides",
    "async_training.compute_prox_log_prob": "algorithm.rollout_correction.bypass_mode decides",
    "async_training.compute_advantage_in_rollout": "the learner computes advantages",
    "async_training.checkpoint_engine.*": "weights are pulled from the weight store",
    "async_training.use_trainer_do_validate": "rollout replicas run the validation, beside the training",
    "critic.*": _NO_CRITIC,
    "reward.*": _REWARD,
    "reward_model.*": _REWARD,
    "trainer.critic_warmup": _NO_CRITIC,
    "trainer.device": "trackway.device selects the learner's device",
    "trainer.balance_batch": "the learner is one process",
    "trainer.log_val_generations": _DUMPS,
    "trainer.rollout_data_dir": _DUMPS,
    "trainer.validation_data_dir": _DUMPS,
    "trainer.default_local_dir": "checkpoints lie in the run's own folder",
    "trainer.default_hdfs_dir": "checkpoints lie in the run's own folder",
    "trainer.del_local_ckpt_after_load": "checkpoints are kept; trainer.max_actor_ckpt_to_keep bounds them",
    "trainer.max_critic_ckpt_to_keep": _NO_CRITIC,
    "trainer.esi_redundant_time": "SIGTERM saves a checkpoint",
    "trainer.ray_wait_register_center_timeout": "the trainer does not use Ray",
    "trainer.use_v1": "there is one trainer",
    "trainer.v1.sync.*": "there is one trainer",
    "trainer.v1.colocate_async.*": "trainer.v1.trainer_mode=colocate_async is refused",
    "trainer.v1.separate_async.hybrid_rollout.*": "the learner's GPUs are not lent to rollout engines",
    "trainer.v1.sampler.sync_refill_failed_groups": "missing rollouts are requested trackway.group_attempts times",
    "trainer.v1.sampler.custom_sampler.*": "groups train in the order in which they were submitted and finished",
    "trainer.v1.sampler.sampler_kwargs.*": "groups train in the order in which they were submitted and finished",
    "rollout.nnodes": _DEPLOYED,
    "rollout.n_gpus_per_node": _DEPLOYED,
    "ray_kwargs.*": "Ray belongs to the deployment",
    "global_profiler.*": "the learner has no profiler hook",
}

MOVED: dict[str, str] = {
    f"trainer.rollout_trace.{name}": f"actor_rollout_ref.rollout.trace.{name}"
    for name in ("backend", "token2text", "max_samples_per_step_per_worker", "project_name", "experiment_name")
} | {f"reward.custom_reward_function.{name}": f"custom_reward_function.{name}" for name in ("path", "name")}
"""A verl release's spelling of a key -> the key that it sets here; null means the default. verl's releases accept
`trainer.rollout_trace` and ignore it; releases from 0.8 write `reward.custom_reward_function`."""

DEPLOYMENT: tuple[str, ...] = (
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in (
            *("name", "tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "dtype"),
            *("enable_prefix_caching", "max_model_len", "max_num_seqs"),
            *("multi_turn.tool_config_path", "multi_turn.function_tool_path", "multi_turn.format"),
            "agent.agent_loop_config_path",
        )
    ),
    *("trainer.n_gpus_per_node", "trainer.nnodes"),
    *("custom_reward_function.path", "trackway.modules", "trackway.code_path"),
)
"""Keys for the deployment of the services; services that already run are not affected. Null leaves a key unset."""

LOGGERS = ("console", "file", "mlflow", "tensorboard", "trackio", "wandb")

OTHER_LOGGERS = ("clearml", "rl_insight", "swanlab", "vemlp_wandb")
"""verl's loggers that have no effect here."""


def without_effect(key: str) -> str | None:
    """The entry of NO_EFFECT that covers `key`, or None."""
    if key in NO_EFFECT:
        return key
    return next((name for name in NO_EFFECT if name.endswith(".*") and key.startswith(name[:-1])), None)


def no_effect(given_keys: Iterable[str]) -> list[tuple[str, str]]:
    """(key, reason) for each given key that is accepted without effect or was renamed, in the order given."""
    notes: list[tuple[str, str]] = []
    for key in given_keys:
        name = without_effect(key)
        if key in MOVED:
            notes.append((key, f"another spelling, read as {MOVED[key]}"))
        elif name is not None:
            notes.append((key, NO_EFFECT[name]))
        elif key.startswith("trainer.logger."):
            notes.append((key, f"there is no such logger here; the loggers are {', '.join(LOGGERS)}"))
    return notes
