"""The settings of a learner: verl's knobs of `actor_rollout_ref.actor` and `algorithm`, checked on creation."""

from dataclasses import dataclass

import torch

from trackway.trainer.learner.algorithm import AGGREGATIONS, KL_KINDS, check_known

MASTER_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Compute dtype by name -> dtype of the weights, of the optimizer's state and of all logprobs."""


@dataclass(frozen=True)
class LearnerConfig:
    """Raises ValueError on an unknown name or a size below 1."""

    model_path: str
    """Folder or Hugging Face id of the model that training starts from, and of the reference model."""
    lr: float = 1e-6
    """AdamW's learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay, on every weight as in verl."""
    lr_warmup_steps: int = 0
    """Calls of update() over which the rate climbs in equal steps to `lr`; the first call trains at lr / steps."""
    lr_scheduler_type: str = "constant"
    """The rate after the warm-up: constant, or cosine, which falls over `total_updates`."""
    total_updates: int = 0
    """Calls of update() in the whole run; the cosine needs it."""
    min_lr_ratio: float = 0.0
    """Where the cosine ends, as a share of `lr`."""
    clip_grad: float = 1.0
    """The gradient's norm is scaled down to this."""
    clip_ratio_low: float = 0.2
    """The probability ratio is clipped below 1 - this."""
    clip_ratio_high: float = 0.2
    """The probability ratio is clipped above 1 + this."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage A a token's loss is at most -A times this; above 1."""
    loss_agg_mode: str = "token-mean"
    """How token losses are reduced to a scalar: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm or
    seq-mean-token-mean."""
    loss_scale_factor: float = 1.0
    """Divisor of seq-mean-token-sum-norm: the length that every response is taken to have."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; the entropy is logged in any case."""
    use_kl_loss: bool = False
    """Whether the loss includes a KL penalty towards the reference model (one more copy of the weights)."""
    kl_loss_coef: float = 0.001
    """Weight of the KL penalty."""
    kl_loss_type: str = "low_var_kl"
    """The KL of each token: kl (k1), abs, mse (k2) or low_var_kl (k3), each also with `+` for k2's gradient, or full,
    the sum over the vocabulary (one more forward of the reference model per micro-batch)."""
    ppo_epochs: int = 1
    """Passes over the batch in one update()."""
    mini_batch_size: int | None = None
    """Trajectories per optimizer step; None takes the whole batch (strictly on-policy)."""
    micro_batch_size: int | None = None
    """Trajectories per forward and backward; memory only, results do not depend on it. None takes a mini-batch."""
    log_prob_micro_batch_size: int | None = None
    """Trajectories per forward of the old-logprob pass; None takes `micro_batch_size`."""
    ref_micro_batch_size: int | None = None
    """Trajectories per forward of the reference model; None takes that of the old-logprob pass. The full KL needs the
    reference next to the policy and so takes `micro_batch_size`."""
    remove_padding: bool = False
    """Computes a micro-batch as one packed row without padding, where the model's layers all have full attention;
    results do not depend on it."""
    param_offload: bool = False
    """The weights are on the device only while they are computed with."""
    optimizer_offload: bool = False
    """AdamW's moments are on the device only during an optimizer step."""
    ref_param_offload: bool = False
    """The reference model is on the device only while it is computed with."""
    temperature: float = 1.0
    """The sampler's temperature: logits are divided by it."""
    shuffle: bool = False
    """Whether trajectories are shuffled into mini-batches, in a new order each epoch."""
    recompute_old_logprobs: bool = False
    """Takes the old logprobs from a pass of the trainer instead of the sampler's; hides a mismatch of the two."""
    norm_adv_by_std: bool = True
    """Whether advantages are divided by the group's standard deviation; False is Dr. GRPO."""
    dtype: str = "float32"
    """Compute dtype: float32, float64, or bfloat16 (autocast over float32 weights)."""
    device: str = "cpu"
    """Torch device of the model."""
    threads: int = 1
    """Torch threads of this process on a CPU; more than the free cores is far slower."""
    seed: int = 0
    """Seed of the shuffling."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, a third more time."""

    def __post_init__(self) -> None:
        check_known("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        check_known("dtype", self.dtype, MASTER_DTYPES)
        check_known("kl_loss_type", self.kl_loss_type, KL_KINDS)
        check_known("lr_scheduler_type", self.lr_scheduler_type, ("constant", "cosine"))
        if self.lr_scheduler_type == "cosine" and self.total_updates < 1:
            raise ValueError(
                f"expected total_updates for a cosine schedule, got {self.total_updates}; set the run's length"
            )
        passes = ("log_prob_micro_batch_size", "ref_micro_batch_size")
        for name in ("mini_batch_size", "micro_batch_size", *passes, "ppo_epochs", "threads"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"expected {name} to be at least 1, got {size}; correct the setting")
        if self.loss_scale_factor <= 0.0:
            raise ValueError(
                f"expected loss_scale_factor above 0, got {self.loss_scale_factor}; give the longest response's tokens"
            )
        if self.clip_ratio_c <= 1.0:
            raise ValueError(f"expected clip_ratio_c above 1, got {self.clip_ratio_c}; verl's value is 3.0")
        if self.temperature <= 0.0:
            raise ValueError(f"expected temperature above 0, got {self.temperature}; train at the sampler's")
