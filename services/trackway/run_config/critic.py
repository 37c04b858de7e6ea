"""The section `critic.*`: the value model of the estimator `gae`, its loss and its optimizer.

Key names and defaults are verl's (verl/trainer/config/critic/dp_critic.yaml, verl/workers/config/critic.py) unless the
field says otherwise.
"""

from pydantic import Field

from trackway.run_config.policy import (
    CheckpointContents,
    LoraConfig,
    LossAggregation,
    OptimConfig,
    OverrideConfig,
    ShardingConfig,
)
from trackway.run_config.section import Section, Seed


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
