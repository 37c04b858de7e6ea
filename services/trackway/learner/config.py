"""Configuration of the learner: sections of the run's, and values that they do not hold."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from trackway.learner.ranks.balance import PassLimit
from trackway.run_config.algorithm import OPTIMAL_BASELINES, AlgorithmConfig
from trackway.run_config.distillation import DistillationLossConfig
from trackway.run_config.policy import (
    ActorConfig,
    CheckpointContents,
    CriticConfig,
    CriticOptimConfig,
    LoraConfig,
    ModelConfig,
    RefConfig,
    RolloutConfig,
    ShardingConfig,
)

WHOLE_LOGITS = 2**26
"""Values of the logits of a pass up to which they are computed whole by default: 256 MiB in float32. Computing the head
twice costs time, which only larger logits are worth."""


class LoraSettings(NamedTuple):
    """Settings of an adapter."""

    rank: int
    alpha: float
    target_modules: str | list[str]
    """Names of modules, a regular expression over their whole names, or `all-linear`, which leaves out the head."""
    exclude_modules: str | list[str] | None
    """Names of modules, or a regular expression, or None for none."""
    seed: int
    """Seed of the random A."""
    adapter_path: str | None = None
    """Folder or Hugging Face id of an adapter to start from, or None for a new one."""
    trains_head: bool = False
    """Train the head too, which has no adapter."""

    @classmethod
    def of(
        cls, model: LoraConfig, seed: int = 0, adapter_path: str | None = None, *, trains_head: bool = False
    ) -> Self | None:
        """Settings of a model's adapter, or None where it is trained whole."""
        if not model.lora_rank:
            return None
        names, excluded = model.target_modules, model.exclude_modules
        return cls(model.lora_rank, model.lora_alpha, names, excluded, seed, adapter_path, trains_head)


class PolicySettings(NamedTuple):
    """Settings of a model that a learner computes with."""

    path: str
    """Folder or Hugging Face id."""
    dtype: str = "float32"
    """Compute dtype, as in LearnerConfig."""
    device: str = "cpu"
    sharding: ShardingConfig = ShardingConfig()
    """The dtype of the weights, their offload, and their sharding over several ranks."""
    gradient_checkpointing: bool = False
    remove_padding: bool = False
    """Pack batches, if the model can be packed."""
    is_frozen: bool = False
    """The model needs no gradients."""
    lora: LoraSettings | None = None
    """The adapter that is trained while the model's own weights stay as loaded; None trains the whole model."""
    head_in_chunks: bool | None = None
    """Whether logits are computed in chunks of tokens. None does so where they are large."""
    head_chunk_size: int = 1024
    """Tokens of a chunk."""
    max_positions: int | None = None
    """Replaces the `max_position_embeddings` of the folder's configuration, also in exports."""
    float32_head: bool = False
    """Compute logits in float32 where the compute dtype is bfloat16."""


class CriticSettings(NamedTuple):
    """Settings of a value model and its training. Sizes count trajectories."""

    model: PolicySettings
    """The model that its training starts from."""
    contents: CheckpointContents
    """Its contents in a checkpoint."""
    optim: CriticOptimConfig
    clip_grad: float
    """The gradient's norm is scaled down to this."""
    mini_batch_size: int
    """Trajectories per optimizer step."""
    limit: PassLimit
    """Limit of a rank's forward and backward."""
    forward_limit: PassLimit
    """Limit of a rank's forward without a gradient."""
    epochs: int
    """Passes over each batch."""
    shuffle: bool
    """Draw a new order for each pass."""
    shuffle_seed: int
    """Seed of this order."""
    cliprange: float
    """Largest change of a value that the loss counts."""
    loss_agg_mode: str
    loss_scale_factor: float
    """Divisor of seq-mean-token-sum-norm."""


@dataclass(frozen=True)
class LearnerConfig:
    """Sections, validated before, and values of the run or the machine.

    A key that the learner uses as it stands is read from its section. The properties are what several keys say
    together, or what verl counts in another unit.
    """

    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutConfig
    ref: RefConfig
    algorithm: AlgorithmConfig
    critic: CriticConfig
    critic_warmup: int
    """First call of `Learner.update`, counted from 1, that updates the policy. 0 and 1 are the same."""
    total_steps: int
    """Calls of `Learner.update` in the whole run. The cosine and a warm-up by ratio need it."""
    max_prompt_length: int
    """Longest prompt in tokens."""
    max_response_length: int
    """Longest response in tokens."""
    dtype: str
    """Compute dtype: float32, float64, or bfloat16 (autocast over weights of `fsdp_config.model_dtype`)."""
    device: str
    """Torch device of the model."""
    threads: int | None
    """Torch threads of this process; None chooses by the model's size and the machine's cores."""
    engine_threads: int
    """Threads of the embedded engine that compute at the same time as the learner."""
    seed: int
    """The run's seed."""
    proximal_logprobs: str
    """`recompute` or `loglinear`: the source of the old logprobs without `bypass_mode`."""
    save_token_values: bool = False
    """Return what an update computed of each token."""
    float32_head: bool = False
    """Compute logits in float32 where the compute dtype is bfloat16."""
    distillation_loss: DistillationLossConfig | None = None
    """The loss towards teachers, or None without any."""

    @property
    def model_path(self) -> str:
        """Folder or Hugging Face id of the model that training starts from, and of the reference model."""
        return self.model.path or ""

    @property
    def max_positions(self) -> int | None:
        """Replaces the `max_position_embeddings` of that model."""
        return self.model.override_config.max_position_embeddings

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter that is trained; None trains the whole model."""
        return LoraSettings.of(self.model, self.seed, self.model.lora_adapter_path)

    def policy_settings(self) -> PolicySettings:
        """Return the settings of the policy."""
        fsdp = self.actor.fsdp_config
        return PolicySettings(
            self.model_path,
            self.dtype,
            self.device,
            fsdp,
            self.model.enable_gradient_checkpointing,
            self.model.use_remove_padding,
            lora=self.lora,
            head_in_chunks=self.model.use_fused_kernels,
            head_chunk_size=fsdp.entropy_from_logits_chunk_size,
            max_positions=self.max_positions,
            float32_head=self.float32_head,
        )

    def reference_settings(self) -> PolicySettings:
        """Return the settings of the reference model, which is sharded as the policy is."""
        weights = {**dict(self.ref.fsdp_config), "offload_policy": False}
        return self.policy_settings()._replace(
            sharding=self.actor.fsdp_config.model_copy(update=weights),
            gradient_checkpointing=False,
            is_frozen=True,
            lora=None,
        )

    @property
    def is_deterministic(self) -> bool:
        """Return whether the kernels of this process are deterministic."""
        sections = (self.actor.fsdp_config, self.ref.fsdp_config, self.critic.fsdp)
        return any(section.full_determinism for section in sections)

    @property
    def publishes_adapter(self) -> bool:
        """Return whether engines get the adapter alone, not whole weights."""
        return self.lora is not None and not self.model.lora.merge

    @property
    def value_model(self) -> CriticSettings | None:
        """The value model, or None for a run without one."""
        critic, actor = self.critic, self.actor
        if not critic.is_used(self.algorithm.adv_estimator):
            return None
        mini = (critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * self.rollout.n
        micro = min(mini, critic.ppo_micro_batch_size_per_gpu or mini)
        is_dynamic = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
        tokens = critic.ppo_max_token_len_per_gpu
        return CriticSettings(
            model=PolicySettings(
                critic.model.path or self.model_path,
                self.dtype,
                self.device,
                critic.fsdp,
                critic.model.enable_gradient_checkpointing,
                critic.model.use_remove_padding,
                lora=LoraSettings.of(critic.model, self.seed, trains_head=True),
                head_in_chunks=False,
                max_positions=critic.model.override_config.max_position_embeddings,
            ),
            contents=critic.checkpoint,
            optim=critic.optim,
            clip_grad=critic.optim.clip_grad or critic.grad_clip,
            mini_batch_size=mini,
            limit=PassLimit(micro, tokens if is_dynamic else None),
            forward_limit=PassLimit(
                critic.forward_micro_batch_size_per_gpu or micro,
                (critic.forward_max_token_len_per_gpu or tokens) if is_dynamic else None,
            ),
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle=actor.shuffle if critic.shuffle is None else critic.shuffle,
            shuffle_seed=self.shuffle_seed if critic.data_loader_seed is None else critic.data_loader_seed,
            cliprange=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
            loss_scale_factor=critic.loss_scale_factor or self.loss_scale_factor,
        )

    @property
    def shuffle_seed(self) -> int:
        """Seed of the order of trajectories, and of a loss that draws tokens."""
        return self.seed if self.actor.data_loader_seed is None else self.actor.data_loader_seed

    @property
    def updates_without_policy(self) -> int:
        """Updates at the beginning of the run that train the value model alone."""
        return max(0, self.critic_warmup - 1)

    @property
    def loss_mode(self) -> str:
        """Name of the policy loss."""
        is_bypass = self.algorithm.rollout_correction.bypass_mode
        return "bypass_mode" if is_bypass else self.actor.policy_loss.loss_mode

    @property
    def trains_entropy(self) -> bool:
        """Return whether the loss has an entropy bonus."""
        return self.actor.entropy_coeff != 0.0

    @property
    def compiles_entropy(self) -> bool:
        """Return whether the entropy is computed by a compiled function."""
        return self.actor.use_torch_compile or self.actor.fsdp_config.use_torch_compile

    @property
    def clip_grad(self) -> float:
        """The gradient's norm is scaled down to this."""
        return self.actor.optim.clip_grad or self.actor.grad_clip

    @property
    def clip_range(self) -> tuple[float, float]:
        """The probability ratio is clipped below 1 - the first and above 1 + the second."""
        low, high, both = self.actor.clip_ratio_low, self.actor.clip_ratio_high, self.actor.clip_ratio
        return (both if low is None else low, both if high is None else high)

    @property
    def loss_scale_factor(self) -> float:
        """Divisor of seq-mean-token-sum-norm: the length that every response is taken to have."""
        return self.actor.loss_scale_factor or float(self.max_response_length)

    @property
    def mini_batch_size(self) -> int:
        """Trajectories per optimizer step. verl's key counts prompts."""
        return self.actor.ppo_mini_batch_size * self.rollout.n

    @property
    def update_limit(self) -> PassLimit:
        """Limit of a rank's forward and backward. Memory only, results do not depend on it."""
        rows = min(self.mini_batch_size, self.actor.ppo_micro_batch_size_per_gpu or self.mini_batch_size)
        return PassLimit(rows, self.actor.ppo_max_token_len_per_gpu if self.actor.use_dynamic_bsz else None)

    @property
    def log_prob_limit(self) -> PassLimit:
        """Limit of the old-logprob pass."""
        rollout, actor = self.rollout, self.actor
        rows = rollout.log_prob_micro_batch_size_per_gpu or self.update_limit.rows
        tokens = rollout.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        is_dynamic = rollout.log_prob_use_dynamic_bsz
        return PassLimit(rows, tokens if (actor.use_dynamic_bsz if is_dynamic is None else is_dynamic) else None)

    @property
    def ref_limit(self) -> PassLimit:
        """Limit of the reference model's pass, except for the full KL, which takes `update_limit`."""
        ref, by_default = self.ref, self.log_prob_limit
        rows = ref.log_prob_micro_batch_size_per_gpu or by_default.rows
        tokens = ref.log_prob_max_token_len_per_gpu or by_default.tokens or self.actor.ppo_max_token_len_per_gpu
        is_dynamic = ref.log_prob_use_dynamic_bsz
        return PassLimit(rows, tokens if (by_default.tokens if is_dynamic is None else is_dynamic) else None)

    @property
    def recompute_old_logprobs(self) -> bool:
        """Return whether the old logprobs come from a pass of the trainer, which hides a mismatch with the sampler."""
        return self.proximal_logprobs == "recompute" and not self.algorithm.rollout_correction.bypass_mode

    @property
    def uses_reference(self) -> bool:
        """Return whether a KL term needs the reference policy."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def sequence_parallel_size(self) -> int:
        """Consecutive ranks that divide the tokens of a row."""
        actor = self.actor
        return max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)

    @property
    def uses_full_kl(self) -> bool:
        """Return whether the loss has the KL term over the whole vocabulary."""
        return self.actor.use_kl_loss and self.actor.kl_loss_type == "full"

    @property
    def measures_distribution(self) -> bool:
        """Return whether the policy's squared probabilities are measured before the update."""
        return self.actor.calculate_sum_pi_squared or self.algorithm.adv_estimator in OPTIMAL_BASELINES

    @property
    def uses_weights(self) -> bool:
        """Return whether importance weights are in the loss. PPO's ratio to the sampler contains them already."""
        correction = self.algorithm.rollout_correction
        clips = correction.bypass_mode and correction.loss_type == "ppo_clip"
        return correction.weight_level is not None and not clips
