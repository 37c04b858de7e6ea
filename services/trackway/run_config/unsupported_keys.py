"""verl's keys that the models of the configuration do not have: without effect, of one value only, or renamed.

A name that ends in `.*` covers all keys below it. The tables let a pasted verl command line run. A key that leaves what
is trained as it is has no effect, and those that were given are logged once at the start (NO_EFFECT). One that would
change it is accepted with the value that Trackway has, and refused with any other (ONLY). One that repeats another key
is refused where the two differ (REPEATED). Single values of keys that have an effect are refused as well
(OTHERS). A dry run lists them and plans without them. A value that verl would not take either is an error for both.
"""

from collections.abc import Collection
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue

from trackway.wire.errors import ErrorCode, TrackwayError

_DEPLOYED = "engines, replicas and GPUs belong to the rollout service's Serve config"
_SEQUENCES = "actor.ulysses_sequence_parallel_size decides"
_FSDP2 = "trackway.learner_ranks shards the learner by FSDP2, computing in trackway.dtype"
_ACTOR_MICRO = "actor.ppo_micro_batch_size_per_gpu counts the trajectories of a pass"
_MICRO = "rollout.log_prob_micro_batch_size_per_gpu counts the trajectories of a pass"
_REF_MICRO = "ref.log_prob_micro_batch_size_per_gpu counts the trajectories of a pass"
_CRITIC_MICRO = "critic.ppo_micro_batch_size_per_gpu counts the trajectories of a pass"
_CRITIC_TOKENS = "the value model reads the policy's token ids"
_REWARD = "scorers belong to the reward service's deployment"
_AGENT = "the agent service's deployment decides"
_FSDP = ("use_orig_params", "use_no_sync_for_gradient_accumulation", "turbo_config.*")
"""Keys below `fsdp_config`."""
_SHARDING = {
    "wrap_policy.*": "each decoder layer is sharded by itself, and the rest together; the numbers are the same",
}
"""The same, of how weights are sharded."""
_NO_ENTROPY = "only the policy's entropy is computed; actor.use_torch_compile compiles it"
_SAME_NUMBERS = "memory and speed only; the numbers are the same"
_LOGITS = ("entropy_from_logits_with_chunking", "entropy_checkpointing")
_CHUNK_SIZE = "actor.fsdp_config.entropy_from_logits_chunk_size decides"
_PADDING = ("pad_to_length", "pad_to_length_bucket")
_TEXT = "rows are text"
_PROFILERS = "global_profiler.tool and global_profiler.steps decide"
_TEACHERS = "the teacher's rollout service decides"
_NOT_LENT = "the learner's GPUs are not lent to rollout engines"
_SCHEDULING = ("policy", "deactivate_ratio", "enable_rebalance")

_MEGATRON = (
    *(f"{of}_parallel_size" for of in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "dynamic_context_parallel"),
    *("max_seqlen_per_dp_cp_rank", "grad_offload", "use_distributed_optimizer", "use_megatron_fsdp", "use_mbridge"),
    *("vanilla_mbridge", "use_remove_padding", "pad_bshd_to_minibatch_max", *_LOGITS, *_PADDING),
    *("entropy_from_logits_chunk_size", "dist_ckpt_optim_fully_reshardable"),
    "distrib_optim_fully_reshardable_mem_efficient",
    *(
        f"override_transformer_config.{name}"
        for name in (
            *("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
            *("attention_backend", "moe_permute_fusion", "moe_grouped_gemm", "moe_token_dispatcher_type"),
            *("moe_enable_deepep", "moe_shared_expert_overlap", "gradient_accumulation_fusion", "apply_rope_fusion"),
        )
    ),
)
"""Keys below `megatron` that leave the numbers as they are, but for rounding."""
_OFFLOADS = ("param_offload", "optimizer_offload")

_TOOL_FILES = ("tool_config_path", "function_tool_path")
"""Below `data`, where verl's length filter reads them. Ours counts the tools that rollouts have."""
_N = "actor_rollout_ref.rollout.n"
_ACTOR_DTYPE = "actor_rollout_ref.actor.fsdp_config.dtype"
_ACTOR_SEED = "actor_rollout_ref.actor.fsdp_config.seed"
_MEGATRON_SECTIONS = {
    "actor_rollout_ref.actor": "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
}
"""Section with keys of Megatron -> section with keys of FSDP."""
_FSDP_SECTIONS = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")

REPEATED: dict[str, str] = {
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    **{f"{section}.rollout_n": _N for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")},
    "rollout.n": _N,
    "actor_rollout_ref.ref.fsdp_config.dtype": _ACTOR_DTYPE,
    "critic.fsdp.dtype": _ACTOR_DTYPE,
    "actor_rollout_ref.ref.fsdp_config.seed": _ACTOR_SEED,
    "critic.fsdp.seed": _ACTOR_SEED,
    "async_training.use_rollout_log_probs": "algorithm.rollout_correction.bypass_mode",
    "actor_rollout_ref.actor.use_rollout_log_probs": "algorithm.rollout_correction.bypass_mode",
    **{f"data.{name}": f"actor_rollout_ref.rollout.multi_turn.{name}" for name in _TOOL_FILES},
}
"""Keys of verl that repeat another one -> that key, which alone counts. Null and the other's value are accepted."""

NO_EFFECT: dict[str, str] = {
    **{key: f"{other} decides; another value is refused" for key, other in REPEATED.items()},
    "data.return_raw_chat": "rows always keep their messages",
    "data.return_raw_input_ids": "rows always keep their messages",
    "data.return_full_prompt": "rows always keep their messages",
    "data.dataloader_num_workers": "rows are held in memory",
    "data.filter_overlong_prompts_workers": "rows are held in memory",
    "data.validation_shuffle": "validation averages over all rows",
    "data.trust_remote_code": "models are loaded without remote code",
    "actor_rollout_ref.hybrid_engine": "learner and rollout replicas are separate processes",
    "actor_rollout_ref.model.use_shm": "weights are pulled from the weight store",
    "actor_rollout_ref.model.trust_remote_code": "models are loaded without remote code",
    "actor_rollout_ref.model.enable_activation_offload": "activations stay on the device",
    **{f"actor_rollout_ref.actor.fsdp_config.{name}": _FSDP2 for name in _FSDP},
    **{f"actor_rollout_ref.actor.fsdp_config.{name}": reason for name, reason in _SHARDING.items()},
    "actor_rollout_ref.actor.calculate_entropy": "the entropy is always computed and logged",
    "actor_rollout_ref.actor.checkpoint.strict": "a checkpoint of another model is always refused",
    "actor_rollout_ref.actor.checkpoint.mbridge_config.*": "only Megatron reads it",
    "actor_rollout_ref.actor.optim.total_training_steps": "the schedule spans the run's steps; verl overwrites the key",
    "actor_rollout_ref.rollout.mode": "rollouts are requests to a service, and those of a batch run concurrently",
    "actor_rollout_ref.rollout.do_sample": "verl 0.9.1 never reads it; rollout.temperature decides",
    "actor_rollout_ref.rollout.data_parallel_size": _DEPLOYED,
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": _DEPLOYED,
    "actor_rollout_ref.rollout.max_num_batched_tokens": _DEPLOYED,
    "actor_rollout_ref.rollout.enable_chunked_prefill": _DEPLOYED,
    "actor_rollout_ref.rollout.load_format": _DEPLOYED,
    "actor_rollout_ref.rollout.layered_summon": "weights are pulled from the weight store",
    "actor_rollout_ref.rollout.nnodes": _DEPLOYED,
    "actor_rollout_ref.rollout.n_gpus_per_node": _DEPLOYED,
    "actor_rollout_ref.rollout.disable_log_stats": _DEPLOYED,
    "actor_rollout_ref.rollout.checkpoint_engine.*": "weights are pulled from the weight store",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "weights are pulled from the weight store",
    "actor_rollout_ref.rollout.prometheus.*": "every service serves /metrics",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "rollouts are always token ids in, token ids out",
    "actor_rollout_ref.rollout.calculate_log_probs": "rollouts always come with their logprobs",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _MICRO,
    "actor_rollout_ref.rollout.agent.num_workers": _AGENT,
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": "sampled ids are never tokenised again",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "sampled ids are never tokenised again",
    "actor_rollout_ref.ref.use_torch_compile": _NO_ENTROPY,
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": _NO_ENTROPY,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": _SEQUENCES,
    "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": _SEQUENCES,
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _REF_MICRO,
    **{f"actor_rollout_ref.ref.fsdp_config.{name}": _FSDP2 for name in _FSDP},
    **{f"actor_rollout_ref.ref.fsdp_config.{name}": reason for name, reason in _SHARDING.items()},
    "actor_rollout_ref.ref.fsdp_config.fsdp_size": "the reference is sharded as the actor is",
    "actor_rollout_ref.ref.fsdp_config.reshard_after_forward": "the reference is sharded as the actor is",
    "actor_rollout_ref.ref.fsdp_config.forward_prefetch": "the reference is sharded as the actor is",
    "actor_rollout_ref.ref.fsdp_config.offload_policy": "ref.fsdp_config.param_offload decides",
    "algorithm.filter_groups.max_inflight_gen_batches": "trackway.max_inflight_groups bounds concurrent prompts",
    "async_training.compute_advantage_in_rollout": "the learner computes advantages",
    "async_training.checkpoint_engine.*": "weights are pulled from the weight store",
    "async_training.use_trainer_do_validate": "rollout replicas run the validation, beside the training",
    "async_training.use_dynamic_resource_scheduling": _NOT_LENT,
    **{f"async_training.dynamic_schedule_{name}": _NOT_LENT for name in _SCHEDULING},
    "async_training.concurrent_samples_per_replica": "actor_rollout_ref.rollout.max_num_seqs bounds a replica",
    **{f"critic.fsdp.{name}": _FSDP2 for name in _FSDP},
    **{f"critic.fsdp.{name}": reason for name, reason in _SHARDING.items()},
    **{f"critic.fsdp.{name}": _SAME_NUMBERS for name in (*_LOGITS, *_PADDING)},
    "critic.fsdp.use_torch_compile": _NO_ENTROPY,
    **{f"{section}.qat.*": "only with qat.enable" for section in _FSDP_SECTIONS},
    "critic.model.fsdp_config.*": _FSDP2,
    "critic.ulysses_sequence_parallel_size": _SEQUENCES,
    "critic.fsdp.ulysses_sequence_parallel_size": _SEQUENCES,
    "critic.fsdp.entropy_from_logits_chunk_size": "the head of a value model is one number",
    "critic.ppo_micro_batch_size": _CRITIC_MICRO,
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu counts the trajectories of a pass",
    "critic.checkpoint.async_save": "actor_rollout_ref.actor.checkpoint.async_save decides for the whole checkpoint",
    "critic.checkpoint.mbridge_config.*": "only Megatron reads it",
    "critic.profiler.*": _PROFILERS,
    "critic.nccl_timeout": "trackway.rank_timeout_s is the deadline of the ranks",
    "critic.optim.total_training_steps": "the schedule spans the run's steps; verl overwrites the key",
    "critic.model.use_shm": "weights are read from the model's folder",
    "critic.model.trust_remote_code": "models are loaded without remote code",
    "critic.model.enable_activation_offload": "activations stay on the device",
    "critic.model.tokenizer_path": _CRITIC_TOKENS,
    "critic.model.custom_chat_template": _CRITIC_TOKENS,
    "critic.model.override_config.attn_implementation": _SAME_NUMBERS,
    "critic.model.lora.*": "only Megatron reads it",
    "critic.model.mtp.*": "only with model.mtp.enable",
    **{
        f"critic.model.{name}": "the loss is computed by PyTorch"
        for name in ("use_liger", "use_fused_kernels", "fused_kernel_options.*")
    },
    "critic.model.tiled_mlp.*": _SAME_NUMBERS,
    "trainer.device": "trackway.device selects the learner's device",
    "trainer.balance_batch": "the ranks of a learner always get about as many tokens",
    "trainer.del_local_ckpt_after_load": "checkpoints are kept; trainer.max_actor_ckpt_to_keep bounds them",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds the value model too; trainer.max_actor_ckpt_to_keep decides",
    "trainer.esi_redundant_time": "SIGTERM saves a checkpoint",
    "trainer.ray_wait_register_center_timeout": "the trainer does not use Ray",
    "trainer.v1.sync.*": "verl has no key there",
    "trainer.v1.separate_async.hybrid_rollout.*": _NOT_LENT,
    "trainer.v1.sampler.custom_sampler.name": "only with trainer.v1.sampler.custom_sampler.path",
    "trainer.v1.sampler.sampler_kwargs.*": "only with trainer.v1.sampler.custom_sampler.path",
    "data.sampler.class_name": "only with data.sampler.class_path",
    "rollout.nnodes": _DEPLOYED,
    "rollout.n_gpus_per_node": _DEPLOYED,
    "ray_kwargs.*": "Ray belongs to the deployment",
    **{
        f"actor_rollout_ref.{role}.{section}{name}": _SAME_NUMBERS
        for role in ("actor", "ref")
        for section in ("", "fsdp_config.")
        for name in (*_LOGITS, *_PADDING)
    },
    **{f"actor_rollout_ref.{role}.profiler.*": _PROFILERS for role in ("actor", "ref", "rollout")},
    "actor_rollout_ref.actor.ppo_micro_batch_size": _ACTOR_MICRO,
    "actor_rollout_ref.actor.freeze_vision_tower": _TEXT,
    "actor_rollout_ref.actor.use_prefix_grouper": _SAME_NUMBERS,
    "actor_rollout_ref.actor.use_fused_kernels": "model.use_fused_kernels decides",
    "actor_rollout_ref.actor.entropy_from_logits_chunk_size": _CHUNK_SIZE,
    "actor_rollout_ref.ref.entropy_from_logits_chunk_size": _CHUNK_SIZE,
    "actor_rollout_ref.ref.fsdp_config.entropy_from_logits_chunk_size": _CHUNK_SIZE,
    "actor_rollout_ref.actor.use_remove_padding": "actor_rollout_ref.model.use_remove_padding decides",
    "actor_rollout_ref.actor.qat.*": "only with qat.enable",
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": "the reference has no optimizer",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": _DEPLOYED,
    "actor_rollout_ref.rollout.expert_parallel_size": _DEPLOYED,
    "actor_rollout_ref.rollout.scheduling_policy": _DEPLOYED,
    "actor_rollout_ref.rollout.router_config_path": _DEPLOYED,
    "actor_rollout_ref.rollout.quantization_config_file": "only with actor_rollout_ref.rollout.quantization",
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization": _DEPLOYED,
    "actor_rollout_ref.rollout.disaggregation.*": _DEPLOYED,
    "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": "a metric of Megatron's",
    "actor_rollout_ref.rollout.mtp.*": "only with model.mtp.enable",
    "actor_rollout_ref.rollout.qat.*": "only with qat.enable",
    "actor_rollout_ref.model.lora.*": "only Megatron reads it; model.lora_rank and its neighbours decide",
    "actor_rollout_ref.model.mtp.*": "only with model.mtp.enable",
    "actor_rollout_ref.model.use_liger": "the loss is computed by PyTorch",
    "actor_rollout_ref.model.fused_kernel_options.*": "the loss is computed by PyTorch",
    "actor_rollout_ref.model.tiled_mlp.*": _SAME_NUMBERS,
    "actor_rollout_ref.model.override_config.attn_implementation": _SAME_NUMBERS,
    **{
        f"{section}.megatron.{name}": reason
        for section, fsdp in _MEGATRON_SECTIONS.items()
        for name, reason in (
            *((name, f"{_SAME_NUMBERS}; Megatron alone reads it") for name in _MEGATRON),
            *((name, f"{fsdp}.{name} decides") for name in _OFFLOADS),
        )
    },
    "actor_rollout_ref.nccl_timeout": "trackway.rank_timeout_s is the deadline of the ranks",
    "algorithm.pf_ppo.*": "only with algorithm.use_pf_ppo",
    "data.use_shm": "rows are held in memory",
    **{f"data.{name}": _TEXT for name in ("image_patch_size", "return_multi_modal_inputs", "mm_processor_kwargs.*")},
    "data.custom_cls.name": "only with data.custom_cls.path",
    "data.pad_mode": "rows are packed without padding; the numbers are the same",
    "data.balance_dp_token": "the ranks of a learner always get about as many tokens",
    "data.num_workers": "rows are held in memory",
    "data.ignore_input_ids_mismatch": "a turn is encoded as a rollout has it, never as part of the whole conversation",
    "profiler.*": _PROFILERS,
    "trainer.profile_interval": _PROFILERS,
    "trainer.seed": "verl's SFT trainer never reads it; trackway.seed decides",
    "reward.num_workers": _REWARD,
    "reward.reward_manager.module.name": "only with reward.reward_manager.module.path",
    "reward.reward_model.*": "the reward model has GPUs and a service of its own",
    "reward.sandbox_fusion.*": "only with reward.sandbox_fusion.url",
    "reward_model.*": _REWARD,
    "sandbox_fusion.*": "only with sandbox_fusion.url",
    **{
        f"distillation.{name}": _TEACHERS
        for name in (
            *("n_gpus_per_node", "nnodes", "teacher_models.teacher_model.num_replicas"),
            "teacher_models.teacher_model.inference.*",
        )
    },
    "distillation.distillation_loss.clip_ratio": "clip_ratio_low and clip_ratio_high decide, as in verl",
    "distillation.distillation_loss.use_chunked_topk": "trackway computes logits in chunks where they are large",
    "distillation.distillation_loss.chunked_topk_chunk_size": _CHUNK_SIZE,
    "transfer_queue.*": "trajectories come as a stream from the agent service",
    "skip.*": "only with skip.<part>.enable",
    "global_profiler.*": "the learner's trace is a file of its own; torch's profiler needs no more",
}


class Only(NamedTuple):
    """The values of a key that are what Trackway does anyway. Others would change what is trained, and are refused."""

    values: tuple[JsonValue, ...]
    """Null is allowed in addition."""
    remedy: str
    """Requirements of other values, and the remedy."""
    others: tuple[str, ...] = ()
    """verl's other values, where it has a list of them."""

    @property
    def allowed(self) -> str:
        """The values as text."""
        return " or ".join(map(str, self.values)) or "null"

    def is_verls(self, value: JsonValue) -> bool:
        """Return whether verl may take a value that is not allowed here: one of its others, or one of the same kind."""
        if self.others:
            return value in self.others
        kinds = {kind for allowed in self.values for kind in _KINDS if _is_of(allowed, kind)}
        return not kinds or any(_is_of(value, kind) for kind in kinds)


_KINDS: tuple[tuple[type, ...], ...] = ((bool,), (int, float), (str,))


def _is_of(value: JsonValue, kind: tuple[type, ...]) -> bool:
    """Return whether a value is of this kind. true and false are no numbers."""
    return isinstance(value, kind) and (bool in kind or not isinstance(value, bool))


_OWN_REWARD_SERVER = (
    "serve the model yourself and give its address as custom_reward_function.reward_kwargs.reward_router_address"
)
_NO_MEGATRON = (
    "the learner is PyTorch's FSDP2, and its AdamW decays norms and biases too; leave out the keys of verl's other "
    "learners, and shard with trackway.learner_ranks"
)
_OTHER_ENGINES = ("megatron", "veomni", "torchtitan", "automodel", "fsdp_turbo")
"""verl's other learners."""
_OWN_SANDBOX = "run code in a scorer of your own: give custom_reward_function.path"
_NO_QAT = "quantised training is not implemented; leave it out"

ONLY: dict[str, Only] = {
    "actor_rollout_ref.actor.optim.optimizer": Only(("AdamW",), "other optimizers are not implemented; take AdamW"),
    "actor_rollout_ref.actor.optim.optimizer_impl": Only(("torch.optim",), "the optimizer is PyTorch's AdamW"),
    "actor_rollout_ref.actor.optim.override_optimizer_config.*": Only((), "set lr, betas and weight_decay instead"),
    **{
        f"actor_rollout_ref.{section}.qat.enable": Only((False,), _NO_QAT)
        for section in ("actor", "actor.fsdp_config", "ref.fsdp_config", "rollout")
    },
    "actor_rollout_ref.rollout.quantization": Only(
        (), "give it to the engine as actor_rollout_ref.rollout.engine_kwargs.vllm.quantization"
    ),
    "actor_rollout_ref.rollout.engine_kwargs.trtllm.*": Only((), "take rollout.name=vllm or sglang, and its arguments"),
    "async_training.compute_prox_log_prob": Only(
        (False,), "algorithm.rollout_correction.bypass_mode=false computes them; leave it out"
    ),
    **{
        f"{section}.mixed_precision.{name}": Only(
            ("fp32", "float32"), "gradients are added up in float32", ("bf16", "bfloat16", "fp16", "float16")
        )
        for section in _FSDP_SECTIONS
        for name in ("reduce_dtype", "buffer_dtype")
    },
    **{
        f"{section}.forward_only": Only(values, "verl sets it for each model; leave it out")
        for section, values in zip(_FSDP_SECTIONS, ((False,), (True, False), (False,)), strict=True)
    },
    "actor_rollout_ref.rollout.full_determinism": Only(
        (False,),
        "rollout.seed seeds each generation; start vLLM with VLLM_BATCH_INVARIANT=1, or SGLang with "
        "engine_kwargs.sglang.enable_deterministic_inference=true",
    ),
    "actor_rollout_ref.rollout.ignore_eos": Only((False,), "a response ends at its end token; leave it out"),
    "actor_rollout_ref.rollout.logprobs_mode": Only(
        ("processed_logprobs",),
        "logprobs are those of the sampling distribution; leave it out",
        ("raw_logprobs", "raw_logits", "processed_logits"),
    ),
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": Only((False,), "routes of experts are not recorded"),
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": Only((1,), "set rollout.n"),
    "actor_rollout_ref.rollout.agent.custom_async_server.path": Only((), "write an engine (CONTRIBUTING.md)"),
    "actor_rollout_ref.rollout.agent.custom_async_server.name": Only((), "write an engine (CONTRIBUTING.md)"),
    "actor_rollout_ref.model.lora.rank": Only((0,), "set actor_rollout_ref.model.lora_rank"),
    "actor_rollout_ref.model.lora.adapter_path": Only((), "set actor_rollout_ref.model.lora_adapter_path"),
    "actor_rollout_ref.model.mtp.enable": Only((False,), "multi-token prediction is not implemented; leave it out"),
    "actor_rollout_ref.model.hf_config_path": Only((), "the configuration lies beside the weights, in model.path"),
    "actor_rollout_ref.model.tokenizer_path": Only((), "the tokenizer lies beside the weights, in model.path"),
    "actor_rollout_ref.model.custom_chat_template": Only((), "put the template into the model's tokenizer"),
    "actor_rollout_ref.model.external_lib": Only((), "name own modules in trackway.modules"),
    **{
        f"{section}.override_config.{name}": Only((0,), "the learner trains without dropout; leave it out")
        for section in ("actor_rollout_ref.model", "critic.model")
        for name in ("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
    },
    "actor_rollout_ref.model.override_config.*": Only((), "change config.json in a copy of the model"),
    "model_engine": Only(("dp",), _NO_MEGATRON, ("megatron", "veomni", "torchtitan")),
    **{
        f"{section}.strategy": Only(("fsdp", "fsdp2"), _NO_MEGATRON, _OTHER_ENGINES)
        for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", *_FSDP_SECTIONS)
    },
    "actor_rollout_ref.actor.megatron.*": Only((), _NO_MEGATRON),
    "actor_rollout_ref.ref.megatron.*": Only((), _NO_MEGATRON),
    "algorithm.use_pf_ppo": Only((False,), "PF-PPO is not implemented; leave it out"),
    "critic.optim.optimizer": Only(("AdamW",), "other optimizers are not implemented; take AdamW"),
    "critic.optim.optimizer_impl": Only(("torch.optim",), "the optimizer is PyTorch's AdamW"),
    "critic.optim.override_optimizer_config.*": Only((), "set lr, betas and weight_decay instead"),
    "critic.fsdp.qat.enable": Only((False,), _NO_QAT),
    "critic.megatron.*": Only((), _NO_MEGATRON),
    "critic.model.lora.rank": Only((0,), "set critic.model.lora_rank"),
    **{
        f"critic.model.{name}": Only((), "merge the adapter into critic.model.path")
        for name in ("lora_adapter_path", "lora.adapter_path")
    },
    "critic.model.mtp.enable": Only((False,), "multi-token prediction is not implemented; leave it out"),
    "critic.model.hf_config_path": Only((), "the configuration lies beside the weights, in critic.model.path"),
    "critic.model.external_lib": Only((), "name own modules in trackway.modules"),
    "critic.model.override_config.*": Only((), "change config.json in a copy of the model"),
    **{name: Only(("fsdp",), _NO_MEGATRON, _OTHER_ENGINES) for name in ("engine", "optim")},
    "model": Only(("hf_model",), "give the keys of the model as model.<key>"),
    "data.tokenizer": Only((), "the tokenizer lies beside the weights, in actor_rollout_ref.model.path"),
    "data.custom_cls.path": Only((), "write the rows to a file (`trackway data`)"),
    "data.sampler.class_path": Only((), "order the rows in the file, with data.shuffle=false"),
    **{
        f"data.{name}_key": Only((f"{name}s",), "rows are text; take rows without media")
        for name in ("image", "video", "audio")
    },
    "reward.reward_manager.source": Only(("register",), "give custom_reward_function.path", ("importlib",)),
    "reward.reward_manager.module.path": Only((), "give custom_reward_function.path"),
    "reward.reward_kwargs.*": Only((), "give arguments of a scorer as custom_reward_function.reward_kwargs"),
    **{
        f"reward.reward_model.rollout.{name}": Only((), _OWN_REWARD_SERVER)
        for name in ("engine_kwargs.*", "quantization")
    },
    "reward.sandbox_fusion.url": Only((), _OWN_SANDBOX),
    **{
        f"reward.{name}": Only((), "a judge of the reward service has judges.max_in_flight instead; leave it out")
        for name in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")
    },
    "reward_model.rollout.engine_kwargs.*": Only((), _OWN_REWARD_SERVER),
    "reward_model.reward_kwargs.*": Only((), "give arguments of a scorer as custom_reward_function.reward_kwargs"),
    "reward_model.reward_loop_source": Only(("register",), "give custom_reward_function.path", ("importlib",)),
    "reward_model.reward_loop_module_path": Only((), "give custom_reward_function.path"),
    "reward_model.sandbox_fusion.url": Only((), _OWN_SANDBOX),
    "sandbox_fusion.url": Only((), _OWN_SANDBOX),
    "distillation.distillation_loss.policy_loss_mode": Only(("vanilla",), "verl refuses others too; leave it out"),
    "trainer.checkpoint_callback_class": Only((), "watch the run's folder of checkpoints"),
    "trainer.v1.sampler.custom_sampler.path": Only(
        (), "algorithm.filter_groups and trackway.max_staleness choose the groups that train; leave it out"
    ),
    "trainer.v1.sampler.sync_refill_failed_groups": Only(
        (False,), "missing rollouts of a group are requested trackway.group_attempts times; raise that"
    ),
    **{
        f"skip.{part}.enable": Only((False,), "rollouts are always requested; leave it out")
        for part in ("rollout", "rollout_tq", "async_rollout")
    },
}
"""Keys of verl of which only some values are accepted. A name that ends in `.*` covers all keys below it."""

MOVED: dict[str, str] = (
    {
        f"trainer.rollout_trace.{name}": f"actor_rollout_ref.rollout.trace.{name}"
        for name in ("backend", "token2text", "max_samples_per_step_per_worker", "project_name", "experiment_name")
    }
    | {f"reward.custom_reward_function.{name}": f"custom_reward_function.{name}" for name in ("path", "name")}
    | {
        f"{old}.{name}": f"reward.reward_kwargs.overlong_buffer_cfg.{name}"
        for old in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
        for name in ("enable", "len", "penalty_factor", "log")
    }
    | {
        **{
            f"actor_rollout_ref.actor.policy_loss.{name}": f"actor_rollout_ref.actor.{name}"
            for name in ("tau_pos", "tau_neg")  # as verl's SAPO example writes them
        },
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.enable": "reward.reward_model.enable",
        "reward_model.model.path": "reward.reward_model.model_path",
        **{
            f"reward_model.rollout.{name}": f"reward.reward_model.rollout.{name}"
            for name in (
                *("name", "tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "dtype"),
                *("enable_prefix_caching", "max_model_len", "max_num_seqs", "prompt_length", "response_length"),
            )
        },
        "reward_model.reward_kwargs.max_resp_len": "reward.reward_kwargs.max_resp_len",
        "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
        **{
            f"{section}.model_config.max_position_embeddings": f"{section}.max_position_embeddings"  # as of Megatron
            for section in ("actor_rollout_ref.model.override_config", "critic.model.override_config")
        },
        "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
        "critic.ppo_infer_micro_batch_size_per_gpu": "critic.forward_micro_batch_size_per_gpu",
        "critic.ppo_infer_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
    }
    | {
        f"critic.model.fsdp_config.{name}": f"critic.fsdp.{name}"
        for name in (
            *("param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "forward_prefetch"),
            "model_dtype",
        )
    }
)
"""A verl release's spelling of a key -> the key that it sets here. null means the default. verl's releases accept
`trainer.rollout_trace` and ignore it. Releases from 0.8 write `reward.custom_reward_function`."""

DEPLOYMENT: tuple[str, ...] = (
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in (
            *("name", "tensor_model_parallel_size", "gpu_memory_utilization", "enforce_eager", "dtype"),
            *("enable_prefix_caching", "max_model_len", "max_num_seqs"),
            *("multi_turn.tool_config_path", "multi_turn.function_tool_path", "multi_turn.format"),
            *("agent.agent_loop_config_path", "engine_kwargs.vllm", "engine_kwargs.sglang"),
        )
    ),
    "data.apply_chat_template_kwargs",
    "trainer.n_gpus_per_node",
    *("custom_reward_function.path", "reward.reward_model.model_path", "trackway.modules", "trackway.code_path"),
)
"""Keys for the deployment of the services. Services that already run are not affected. Null leaves a key unset."""

LOGGERS = ("console", "file", "mlflow", "tensorboard", "wandb")

OTHER_LOGGERS = ("clearml", "rl_insight", "swanlab", "trackio", "vemlp_wandb")
"""verl's loggers that have no effect here."""


def without_effect(key: str) -> str | None:
    """The entry of NO_EFFECT that covers `key`, or None."""
    return _covering(key, NO_EFFECT)


def limited(key: str) -> str | None:
    """The entry of ONLY that covers `key`, or None. It goes before one of NO_EFFECT, except one for the key itself."""
    return None if key in NO_EFFECT else _covering(key, ONLY)


def _covering(key: str, table: Collection[str]) -> str | None:
    if key in table:
        return key
    return next((name for name in table if name.endswith(".*") and f"{key}.".startswith(name[:-1])), None)


def no_effect(given_keys: Collection[str]) -> list[tuple[str, str]]:
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


class UnsupportedKey(BaseModel):
    """A key whose value asks for what Trackway does not have."""

    model_config = ConfigDict(frozen=True)

    key: str
    expected: str
    got: str
    remedy: str

    @property
    def sentence(self) -> str:
        """The key, what was expected, what came, and what to do."""
        return f"{self.key}: expected {self.expected}, got {self.got}; {self.remedy}"

    @property
    def error(self) -> TrackwayError:
        """The refusal of a run."""
        return TrackwayError(ErrorCode.INVALID_REQUEST, self.sentence, key=self.key)


class UnsupportedError(ValueError):
    """Raised by a validator for a value, or values together, that ask for what Trackway does not have."""

    def __init__(self, unsupported: UnsupportedKey) -> None:
        super().__init__(unsupported.sentence)
        self.unsupported = unsupported


class Other(NamedTuple):
    """Values of verl's that a key does not have here, though it has others."""

    values: tuple[str, ...]
    expected: str
    remedy: str


_HALF = Other(
    ("float16", "fp16"),
    "float32 or bfloat16",
    "float16 needs scaled gradients, which the learner does not have: take bfloat16",
)
_HALF_ENGINE = Other(("float16", "fp16", "half"), "float32, bfloat16 or auto", "take the learner's, bfloat16")
_TRTLLM = Other(("trtllm",), "vllm, sglang, hf or torch", "take vllm or sglang, and its arguments")

OTHERS: dict[str, Other] = {
    "actor_rollout_ref.rollout.name": _TRTLLM,
    "reward.reward_model.rollout.name": _TRTLLM,
    "actor_rollout_ref.rollout.dtype": _HALF_ENGINE,
    "reward.reward_model.rollout.dtype": _HALF_ENGINE,
    "actor_rollout_ref.actor.fsdp_config.dtype": _HALF,
    **{
        f"{section}.{name}": _HALF
        for section in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
        for name in ("model_dtype", "mixed_precision.param_dtype")
    },
    "global_profiler.tool": Other(
        ("nsys", "npu", "torch_memory", "precision_debugger"), "torch", "start the worker under that tool"
    ),
}
"""Key that has an effect -> values that verl has in addition."""


def shown(value: JsonValue) -> str:
    """A value in a message."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def other_value(key: str, value: JsonValue) -> UnsupportedKey | None:
    """The key, if it has a value of OTHERS."""
    other = OTHERS.get(key)
    if other is None or value not in other.values:
        return None
    return UnsupportedKey(key=key, expected=other.expected, got=shown(value), remedy=other.remedy)
