"""The sections `actor_rollout_ref.*` and `critic.*`: models, their optimisation, and how the policy is sampled.

Key names and defaults are verl's (verl/trainer/config, verl/workers/config) unless a field says otherwise.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from trackway.run_config.algorithm import known_function
from trackway.run_config.section import Section, Seed, null_is_the_default
from trackway.wire.base import Label
from trackway.wire.trajectory import TraceBackend

KlKind = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "full",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
]


LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a running mean."""


class LoraSyncConfig(Section):
    """How a trained adapter reaches the engines."""

    merge: bool = False
    """Publish whole weights with the adapter in them, which every engine loads. False publishes the adapter alone,
    megabytes, which vLLM and SGLang load beside the base model (`max_lora_rank` of the rollout service) and the
    embedded engine merges."""


class LoraConfig(Section):
    """A low-rank adapter that is trained instead of a model's own weights."""

    lora_rank: int = Field(default=0, ge=0)
    """Rank of a LoRA adapter, which is trained and published instead of the model's own weights; 0 trains the whole
    model. Learning rates are about ten times higher than for the whole model."""
    lora_alpha: float = Field(default=16, gt=0)
    """The adapter's update is scaled by this divided by its rank."""
    target_modules: str | list[str] = "all-linear"
    """Adapted layers by the last parts of their names, or as a regular expression. `all-linear` leaves out the head."""
    exclude_modules: str | list[str] | None = None
    """Layers that are not adapted, in the same way."""


class OverrideConfig(Section):
    """Replacements for keys of the model's `config.json`."""

    max_position_embeddings: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens that the model is taken to read, for engines, learner and exported folders. null takes
    that of the model. A model whose positions are weights is refused as it loads."""


class ModelConfig(LoraConfig):
    """The policy's weights."""

    path: str | None = None
    """Folder or Hugging Face id of the model and its tokenizer. With null, `trackway train` trains the model that the
    services on this machine serve."""
    use_remove_padding: bool = True
    """Compute a micro batch as one packed row without padding; it needs no flash-attn. Models with sliding windows,
    chunked attention or recurrent layers are padded regardless. The result does not change."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass to save memory."""
    use_fused_kernels: bool | None = None
    """Compute logits in chunks of `actor.fsdp_config.entropy_from_logits_chunk_size` tokens, and again in the backward
    pass, so that they are never held whole. null does so where those of a pass would take more than 256 MiB in float32.
    The result does not change."""
    lora_adapter_path: str | None = None
    """Folder or Hugging Face id of an adapter as PEFT writes it, from which training starts. null starts a new one.
    With `lora_rank=0`, the folder sets rank, alpha and layers. For a folder that is not on this machine, set
    `lora_rank`, `lora_alpha` and `target_modules` as the adapter has them."""
    lora: LoraSyncConfig = Field(default_factory=LoraSyncConfig)
    override_config: OverrideConfig = Field(default_factory=OverrideConfig)

    @model_validator(mode="before")
    @classmethod
    def _an_adapter_brings_its_shape(cls, given: dict[str, object]) -> dict[str, object]:
        path = given.get("lora_adapter_path")
        file = Path(str(path)).expanduser() / "adapter_config.json"
        if path is None or given.get("lora_rank") or not file.is_file():
            return given
        try:
            adapter = json.loads(file.read_bytes())
            shape = {"lora_rank": adapter["r"], "lora_alpha": adapter["lora_alpha"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"lora_adapter_path: expected PEFT's settings in {file}, got {error!r}") from error
        return {**given, **shape, "target_modules": adapter.get("target_modules"), "exclude_modules": None}

    @property
    def lacks_rank(self) -> bool:
        """Return whether training starts from an adapter of unknown rank."""
        return self.lora_adapter_path is not None and not self.lora_rank


class OptimConfig(Section):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay."""
    lr_warmup_steps: int = Field(default=-1, ge=-1)
    """Steps over which the rate rises linearly, from `lr` / steps (in verl from 0). -1 or 0 uses
    `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up steps as a share of the run's steps. 0 starts at the full rate."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """The rate after the warm-up: constant, or a cosine between `lr` and `min_lr_ratio` of it over the run's steps."""
    num_cycles: float = Field(default=0.5, gt=0)
    """Waves of the cosine: 0.5 falls once, 1 falls and rises again."""
    zero_indexed_step: bool = True
    """Count the first update as 0 in the cosine. false counts it as 1, so that the last update has the final rate."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final rate of the cosine, as a share of `lr`."""
    clip_grad: float | None = Field(default=None, gt=0)
    """Bound on the gradient's norm. None takes `actor.grad_clip`."""

    _null_is_the_default = field_validator("lr_scheduler_type", mode="before")(null_is_the_default)

    def warmup_updates(self, total: int) -> int:
        """Updates, of `total` in the run, over which the rate rises; the first one trains at lr / updates."""
        return self.lr_warmup_steps if self.lr_warmup_steps > 0 else int(self.lr_warmup_steps_ratio * total)


LOSSES = (
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "cispo", "gpg", "dro", "clip_cov", "kl_cov", "geo_mean"),
    "bypass_mode",
)
"""Names of `loss_mode`: the functions marked `@policy_loss` in `trackway.learner.policy_losses`."""


class PolicyLossConfig(Section):
    """The policy loss."""

    loss_mode: str = "vanilla"
    """The loss. Vanilla is PPO's clipped loss with dual clip, and `algorithm.rollout_correction.bypass_mode` sets
    bypass_mode. sapo aggregates as seq-mean-token-mean and geo_mean over sequences, whatever `loss_agg_mode` is. The
    clip ranges of dppo_tv and dppo_kl are differences of probability, and KL."""
    clip_cov_ratio: float = Field(default=0.0002, gt=0, le=1)
    """Share of tokens that `clip_cov` leaves out, at least one."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of tokens that `clip_cov` may leave out."""
    clip_cov_ub: float = 5.0
    """Upper bound of it."""
    kl_cov_ratio: float = Field(default=0.0002, gt=0, le=1)
    """Share of tokens, by highest covariance, that `kl_cov` penalises. At least one token."""
    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """Weight of that penalty, the absolute log ratio."""
    dro_beta: float | None = Field(default=None, gt=0)
    """Weight of the squared log ratio in `dro`, which needs it."""

    @field_validator("loss_mode")
    @classmethod
    def _loss_is_known(cls, name: str) -> str:
        return known_function(name, LOSSES)

    @model_validator(mode="after")
    def _dro_has_its_weight(self) -> Self:
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ValueError("dro_beta: expected a positive number with loss_mode=dro, got null; set it")
        return self


class MixedPrecisionConfig(Section):
    """Exchange of a model between the ranks of a learner; no effect in one process."""

    param_dtype: Literal["bf16", "bfloat16", "fp32", "float32"] = "bf16"
    """Data type in which ranks gather weights to compute in bfloat16. bf16 sends half of the bytes. Fp32 has norms and
    hidden states in float32, as one process has. The weights stay in `model_dtype`, and gradients are added up in
    float32."""


class WeightsConfig(Section):
    """The weights of a model of the learner, and the kernels that compute with them."""

    mixed_precision: MixedPrecisionConfig = Field(default_factory=MixedPrecisionConfig)
    model_dtype: Literal["fp32", "float32", "bf16", "bfloat16"] = "fp32"
    """Data type of the weights, and of their gradients and AdamW's moments. bf16 halves the memory, computes in
    bfloat16, and loses changes smaller than about 1/256 of a weight."""
    full_determinism: bool = False
    """Take PyTorch's deterministic kernels and seed its generators by `actor.fsdp_config.seed`. The learner is one
    process per rank: true for one of its models holds for all. An operation without such a kernel is warned of."""

    _null_is_the_default = field_validator("*", mode="before")(null_is_the_default)

    @property
    def is_bfloat16(self) -> bool:
        """Return whether the weights are bfloat16."""
        return self.model_dtype in ("bf16", "bfloat16")

    @property
    def is_gathered_in_bfloat16(self) -> bool:
        """Return whether ranks that compute in bfloat16 gather the weights in it."""
        return self.mixed_precision.param_dtype in ("bf16", "bfloat16")


class ShardingConfig(WeightsConfig):
    """Sharding of a model over the learner's ranks, and CPU offload, which has no effect without a GPU."""

    fsdp_size: int = Field(default=-1, ge=-1)
    """Consecutive ranks that share the weights, such as one node's. Each such group holds all of them (hybrid
    sharding). -1, or as many as there are ranks, shares them over all; else it divides their number. The result does
    not depend on it, but for rounding."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a layer between its forward and its backward, which gathers them again; no effect
    in one process."""
    forward_prefetch: bool = False
    """Gather the weights of the next layer before a layer's forward rather than during it, as far as the CPU runs ahead
    of the GPU; no effect in one process."""
    offload_policy: bool = False
    """Keep weights and moments in main memory, as `param_offload` and `optimizer_offload` do; a learner of several
    ranks then steps its optimizer there too. Experimental: no weights have been offloaded from a GPU."""

    param_offload: bool = False
    """Keep the weights on the GPU only while they are in use. Experimental: no weights have been offloaded from
    a GPU."""
    optimizer_offload: bool = False
    """Keep AdamW's moments on the GPU only during an optimizer step. Experimental: no weights have been offloaded from
    a GPU."""


class FSDPConfig(ShardingConfig):
    """Sharding and offload of the policy, and how its passes are divided."""

    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Another name of `actor.ulysses_sequence_parallel_size`. The larger one counts."""
    dtype: Literal["bfloat16", "bf16", "float32", "fp32"] = "bfloat16"
    """Data type of the computation with `trackway.dtype=auto`: float32 holds everywhere, bfloat16 on a GPU."""
    entropy_from_logits_chunk_size: int = Field(default=1024, ge=1)
    """Most tokens whose logits exist at a time with `model.use_fused_kernels`."""
    use_torch_compile: bool = False
    """Another name of `actor.use_torch_compile`. One of them is enough."""
    seed: Seed = 42
    """Seed of the learner's generators with `full_determinism`, which own losses and estimators may draw from."""


class RefOffloadConfig(WeightsConfig):
    """The reference policy's weights, which have no optimizer."""

    param_offload: bool = False
    """Keep the reference's weights on the GPU only while they are in use."""


class CheckpointContents(Section):
    """Contents of a checkpoint of a model and its training."""

    save_contents: tuple[Literal["model", "optimizer", "extra", "hf_model"], ...] = ("model", "optimizer", "extra")
    """Saved contents: the weights, AdamW's moments, and `extra`: the updates done, by which the learning rate goes on,
    and the random state. `model` must be among them. `hf_model` adds the policy as a Hugging Face folder,
    `actor/huggingface`. `trackway export` makes one without it."""
    load_contents: tuple[Literal["model", "optimizer", "extra", "hf_model"], ...] | None = None
    """Contents restored from a checkpoint, its own or `trainer.resume_from_path`. null restores what is saved.
    Without `optimizer` the moments start at zero, without `extra` the learning rate at its first step."""

    @property
    def loaded(self) -> frozenset[str]:
        """The contents that are restored."""
        return frozenset(self.save_contents if self.load_contents is None else self.load_contents)

    @model_validator(mode="after")
    def _resumes(self) -> Self:
        if "model" not in self.save_contents:
            raise ValueError("expected model among save_contents, got none: the run could not resume; add it")
        missing = sorted(self.loaded - set(self.save_contents))
        if missing:
            raise ValueError(
                f"expected load_contents among save_contents, got {', '.join(missing)}: the run could not resume from "
                "its own checkpoints; save them too, or do not load them"
            )
        return self


class CheckpointConfig(CheckpointContents):
    """Contents of a checkpoint of the policy, and when it is written."""

    async_save: bool = True
    """Copy what is saved to main memory, and write it while the training goes on. The copy takes 12 bytes for each
    weight that is trained, 6 in bfloat16, divided by the ranks. With false the step waits until it is written."""


class ActorConfig(Section):
    """The loss and the batch sizes."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    ppo_mini_batch_size: int = Field(default=256, ge=1)
    """Prompts per optimizer step, each with all its rollouts."""
    ppo_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Trajectories per forward and backward pass. None takes the whole mini batch. The result does not depend on it."""
    use_dynamic_bsz: bool = False
    """Fill each pass by tokens, up to `ppo_max_token_len_per_gpu`, instead of by trajectories. The result does not
    depend on it."""
    ppo_max_token_len_per_gpu: int = Field(default=16384, ge=1)
    """Most tokens of a pass with `use_dynamic_bsz`. A longer trajectory is computed alone."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks of the learner that divide the tokens of each packed row, for long rows (Ulysses); it divides
    `trackway.learner_ranks` and the model's attention heads. No effect in one process."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    shuffle: bool = False
    """Draw a new order of the trajectories for each pass."""
    data_loader_seed: Seed | None = None
    """Seed of this order, and of the draws of `clip_cov`. Null takes `trackway.seed`."""
    clip_ratio: float = Field(default=0.2, ge=0)
    """PPO's clip range in both directions. In verl's own files it has no effect, because they set low and high."""
    clip_ratio_low: float | None = Field(default=None, ge=0)
    """The range below 1. None takes `clip_ratio`."""
    clip_ratio_high: float | None = Field(default=None, ge=0)
    """The range above 1. None takes `clip_ratio`."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound on the loss of a negative advantage."""
    tau_pos: float = Field(default=1.0, gt=0)
    """Temperature of `sapo` for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Temperature of `sapo` for the other advantages."""
    loss_agg_mode: LossAggregation = "token-mean"
    """Aggregation of the token losses. A mean over sequences divides by the trained trajectories, in verl by the
    nominal mini batch."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`. None takes `data.max_response_length`, verl the width of its padded
    batch."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_torch_compile: bool = False
    """Compute the entropy by a function that `torch.compile` makes. Nothing else is compiled, as in verl. It needs a
    compiler, on CPUs one for C++, and makes the first start with a model longer."""
    calculate_sum_pi_squared: bool = False
    """Measure the sum of squared probabilities at each token, for own estimators. An optimal token baseline always
    does. With `bypass_mode` it takes a pass of the policy."""
    use_kl_loss: bool = False
    """Add a KL term against the reference policy, which is the model the run started from."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL term."""
    kl_loss_type: KlKind = "low_var_kl"
    """Estimator of the KL term. `k1`, k2 and k3 are other names of kl, mse and low_var_kl. `full` sums over the whole
    vocabulary, with the memory of a second set of logits. A name with `+` keeps its value and takes the gradient of
    k2."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Bound on the gradient's norm."""


class ValKwargs(Section):
    """Sampling in validation."""

    do_sample: bool = False
    """False decodes greedily and ignores the temperature."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature when `do_sample` is true."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: cumulative probability of the tokens that are kept."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of most likely tokens that are kept. -1 keeps all."""
    n: int = Field(default=1, ge=1, le=1024)
    """Rollouts per validation prompt."""


class MultiTurnConfig(Section):
    """Limits on an agent's turns and observations."""

    enable: bool = False
    """Rows without an `agent_name` run as `tool_agent` when true, else as `agent.default_agent_loop`."""
    max_assistant_turns: int | None = Field(default=None, ge=1)
    """Most turns of a trajectory."""
    max_user_turns: int | None = Field(default=None, ge=1)
    """Most turns that answer the model, such as a round of tool calls. The model's next turn is the last."""
    max_parallel_calls: int = Field(default=1, ge=1)
    """Most tool calls of one turn, run in parallel. Further calls are not run, and the model gets an error for them."""
    max_tool_response_length: int | None = Field(default=256, ge=1)
    """Most characters of one observation. null means no limit. `trackway.max_tool_response_tokens` limits tokens."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Side on which a longer observation is truncated."""
    tool_config_path: str | None = None
    """verl's YAML file of tools for the tool server. null leaves them to the deployment."""
    format: str | None = None
    """Format of the model's tool calls: `hermes`, `qwen3_coder`, `llama3_json`, `mistral`, `pythonic`, or the name of
    an own `@register_tool_format`. null leaves it to the deployment, which takes what the chat template writes."""
    function_tool_path: str | None = None
    """Python file with `@function_tool` functions for the tool server. null leaves them to the deployment."""


class TraceConfig(Section):
    """Selection, backends and content of the traces."""

    backend: tuple[TraceBackend, ...] = ()
    """`mlflow`, `weave`, `otlp`, or several as a list. null leaves it to the services' settings, and verl's `dummy`
    traces nothing.
    Experimental: nothing has been sent to W&B's own servers."""
    token2text: bool = False
    """Record the text of prompts and responses on spans, not only the number of tokens."""
    max_samples_per_step_per_worker: int | None = Field(default=None, ge=0)
    """Prompts traced per step, each with all its rollouts. None traces all when a backend is set."""
    project_name: Label | None = None
    """MLflow experiment, or Weave project (`entity/project`), of the traces. None takes `trainer.project_name`."""
    experiment_name: Label | None = None
    """The tag `experiment_name` of each trace. None takes `trainer.experiment_name`."""

    @field_validator("backend", mode="before")
    @classmethod
    def _one_backend_is_a_list(cls, value: object) -> object:
        if value is None:
            return []
        return list(dict.fromkeys(value)) if isinstance(value, list) else [value] if isinstance(value, str) else value

    _null_is_the_default = field_validator("token2text", mode="before")(null_is_the_default)


class AgentConfig(Section):
    """The agent loop."""

    default_agent_loop: str = "single_turn_agent"
    """Loop of rows without an `agent_name` when `multi_turn.enable` is false."""
    agent_loop_config_path: str | None = None
    """verl's YAML list of own agent loops, each with `name`, `_target_` and arguments of its class. null leaves them to
    the deployment."""


_ARGUMENTS_OF_THE_SERVICE = ("model", "host", "port", "served_model_name", "logprobs_mode", "skip_tokenizer_init")
"""Arguments that the rollout service relies on."""


class EngineKwargsConfig(Section):
    """Further arguments of the engine's server, for the deployment: `vllm.swap_space=8` is `--swap-space 8`."""

    vllm: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of a vLLM server by name."""
    sglang: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of an SGLang server by name."""

    @field_validator("vllm", "sglang")
    @classmethod
    def _leaves_the_service_its_own(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        taken = [name for name in arguments if name.replace("-", "_") in _ARGUMENTS_OF_THE_SERVICE]
        if taken:
            raise ValueError(
                f"expected arguments that the rollout service leaves open, got {', '.join(taken)}; leave them out"
            )
        return arguments


class RolloutConfig(Section):
    """Sampling of the policy, and the rollout engines."""

    n: int = Field(default=1, ge=1, le=1024)
    """Rollouts per prompt: the size of the group for relative advantages."""
    over_sample_rate: float = Field(default=0.0, ge=0, lt=1)
    """Sets `trackway.over_sample_rate`. In verl a step aborts the rollouts that are left, and trains fewer; here it
    trains whole groups, as many as ever, and the others go on."""
    temperature: float = Field(default=1.0, ge=1e-6)
    """Divisor of the logits, in sampling and in the learner's log-probabilities."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: cumulative probability of the tokens that are kept."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of most likely tokens that are kept. -1 keeps all."""
    seed: Seed | None = None
    """Seed of the generations, each with its position. Null takes `trackway.seed`."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Trajectories per pass that recomputes old logprobs. None takes `actor.ppo_micro_batch_size_per_gpu`."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Fill these passes by tokens. None takes `actor.use_dynamic_bsz`."""
    log_prob_max_token_len_per_gpu: int | None = Field(default=None, ge=1)
    """Most tokens of such a pass. None takes `actor.ppo_max_token_len_per_gpu`."""
    name: Literal["vllm", "sglang", "hf", "torch"] | None = None
    """Engine of the rollout service: a vLLM or SGLang server, or the embedded torch engine (also `hf`). For this and
    all following keys, null leaves the choice to the deployment."""
    tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """GPUs per rollout replica. The number of replicas follows from the run's GPUs. Experimental: no engine has
    run on several GPUs."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for the engine's weights and KV cache."""
    free_cache_engine: bool | None = None
    """Release the engines' memory while the learner trains. null does so if every engine can (`enable_sleep`), and true
    refuses a run whose engines cannot. Services that `trackway train` starts can: vLLM and SGLang on GPUs unless this
    is false, the embedded engine if it is true. Experimental: no engine has slept on a GPU."""
    multi_stage_wake_up: bool | None = None
    """Allocate memory for weights first, and for the KV cache once the new weights are loaded. Null is true."""
    enforce_eager: bool | None = None
    """Run the engines without CUDA graphs."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV cache of common prompt prefixes."""
    dtype: Literal["float32", "bfloat16", "auto"] | None = None
    """Data type of the engine."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response together."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most concurrent requests per engine."""
    engine_kwargs: EngineKwargsConfig = Field(default_factory=EngineKwargsConfig)
    val_kwargs: ValKwargs = Field(default_factory=ValKwargs)
    multi_turn: MultiTurnConfig = Field(default_factory=MultiTurnConfig)
    trace: TraceConfig = Field(default_factory=TraceConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)


class RefConfig(Section):
    """The reference policy: the model the run started from, kept by the learner if a KL term needs it."""

    log_prob_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Trajectories per pass of the reference. None takes the value of the old-logprob pass. `kl_loss_type=full`
    computes the reference in the actor's micro batches."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Fill the reference's passes by tokens. None does what the old-logprob pass does."""
    log_prob_max_token_len_per_gpu: int | None = Field(default=None, ge=1)
    """Most tokens of such a pass. None takes the value of the old-logprob pass."""
    fsdp_config: RefOffloadConfig = Field(default_factory=RefOffloadConfig)


class ActorRolloutRefConfig(Section):
    """The policy as actor, rollout model and reference."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    ref: RefConfig = Field(default_factory=RefConfig)


class CriticOptimConfig(OptimConfig):
    """AdamW of the value model."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate after the warm-up."""
    clip_grad: float | None = Field(default=None, gt=0)
    """Bound on the gradient's norm. None takes `critic.grad_clip`."""


class CriticModelConfig(LoraConfig):
    """The value model's weights."""

    lora_rank: int = Field(default=0, ge=0)
    """Rank of a LoRA adapter, which is trained with the head instead of the value model's other weights; 0 trains the
    whole model."""

    path: str | None = None
    """Folder or Hugging Face id of the value model. null takes the policy's own. A head `score`, as a model for token
    classification has it, is read. Without one the head is new, and the first values are 0."""
    use_remove_padding: bool = True
    """Compute a micro batch as one packed row without padding if all layers have full attention."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass to save memory."""
    override_config: OverrideConfig = Field(default_factory=OverrideConfig)


class CriticConfig(Section):
    """The value model: a language model with one number as its head, trained together with the policy."""

    enable: bool | None = None
    """Train a value model. null does so for `adv_estimator=gae`. With other estimators it learns the rewards to go, and
    own estimators get its values."""
    model: CriticModelConfig = Field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    fsdp: ShardingConfig = Field(default_factory=ShardingConfig)
    checkpoint: CheckpointContents = Field(default_factory=CheckpointContents)
    ppo_mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts per optimizer step, each with all its rollouts. Null takes `actor.ppo_mini_batch_size`."""
    ppo_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Trajectories per forward and backward pass. null takes the whole mini batch. The result does not depend on it."""
    forward_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    """Trajectories per pass that computes values. Null takes `critic.ppo_micro_batch_size_per_gpu`."""
    use_dynamic_bsz: bool | None = None
    """Fill passes by tokens instead of by trajectories. Null takes `actor.use_dynamic_bsz`."""
    ppo_max_token_len_per_gpu: int = Field(default=32768, ge=1)
    """Most tokens of a pass with `use_dynamic_bsz`. A longer trajectory is computed alone."""
    forward_max_token_len_per_gpu: int | None = Field(default=None, ge=1)
    """Most tokens of a pass that computes values. Null takes `critic.ppo_max_token_len_per_gpu`."""
    ppo_epochs: int | None = Field(default=None, ge=1)
    """Passes over each batch. Null takes `actor.ppo_epochs`."""
    shuffle: bool | None = None
    """Draw a new order of the trajectories for each pass. Null takes `actor.shuffle`."""
    data_loader_seed: Seed | None = None
    """Seed of this order. Null takes `actor.data_loader_seed`."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """The loss takes a value as moved by at most this from the value before the update."""
    loss_agg_mode: LossAggregation | None = None
    """Aggregation of the token losses. Null takes `actor.loss_agg_mode`."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`. null takes the actor's."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Bound on the gradient's norm."""

    def is_used(self, estimator: str) -> bool:
        """Return whether a run with this estimator has a value model."""
        return estimator == "gae" if self.enable is None else self.enable
