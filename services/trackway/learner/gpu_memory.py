"""Forecast of a GPU's memory: one rank of the learner, and an engine on the same GPU.

A model of P parameters, T of them trained, is shared by s ranks. A weight has w bytes, and a value in the layers c
(2 under autocast). A pass has t tokens, and the model L layers of H hidden, Q query, K key and I inner values:

    weights        w P / s                           sharded as by ZeRO-3 (arXiv:1910.02054, section 3)
    gradients      w T / s                           between the first pass and the optimizer step
    moments        2 w T / s                         AdamW's
    gathered       weights of the root and of two layers, and their gradients before they are sharded (FSDP2);
                   in one process the copies that autocast makes of a layer and of the head
    activations    t L H r with checkpoints (r bytes of a hidden value) and those of one layer,
                   else those of L layers: t ((5 c + 4 r) H + c (2 Q + 2 K + 4 I)) each
    logits         n V (2 c + 12) for the n tokens whose logits exist at a time (passes/head.py): the head's output,
                   float32 logits, their log_softmax, and the gradients. C is 4 with trackway.float32_head
    KV cache       2 L K e bytes a token (arXiv:2309.06180, section 3), e bytes a value

Weights, gradients and moments are exact. Activations are counted as in arXiv:2205.05198, section 4.1, for gated layers
with RMSNorm and an attention kernel that keeps no scores. They are within a quarter of what autograd keeps of Llama,
Qwen2 and Qwen3. Not counted: fragmentation, NCCL's buffers, a second copy of the weights for CUDA IPC.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from trackway.learner.config import WHOLE_LOGITS, LearnerConfig, LoraSettings
from trackway.learner.ranks.balance import PassLimit
from trackway.run_config.placement import Placement
from trackway.run_config.policy import ShardingConfig, WeightsConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ADVICE = (
    "The learner takes less memory of each GPU with more trackway.learner_ranks, with actor.fsdp_config.param_offload "
    "and optimizer_offload, and with a smaller ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu. Engines that "
    "share the GPU leave it more with a lower rollout.gpu_memory_utilization."
)
CONTEXT_BYTES = 2**29
"""Taken by each process on a GPU for CUDA's context and the libraries' own memory. Assumed: it depends on the GPU."""
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class ModelSize(NamedTuple):
    """Counts of a model's parameters, and the widths of its layers."""

    parameters: int
    trained: int
    """Parameters of the adapter; all without one."""
    root: int
    """Parameters outside the layers: embedding, head, last norm."""
    layer: int
    """Parameters of the largest layer."""
    layers: int
    hidden: int
    queries: int
    """Values of a token's query, over all heads."""
    keys: int
    """Values of a token's key, over all heads. Its value has as many."""
    head: int
    """Values of a token's key in one head."""
    inner: int
    """Inner values of a token in a layer's feed-forward part, over its experts."""
    vocabulary: int

    @classmethod
    def of(cls, config: "PreTrainedConfig", lora: LoraSettings | None = None) -> Self:
        """Count the model of a configuration, which is made without memory."""
        import torch  # the process of a run imports them late
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        whole = trained = sum(parameter.numel() for parameter in model.parameters())
        if lora is not None:
            from peft import LoraConfig, inject_adapter_in_model

            adapted = LoraConfig(
                r=lora.rank,
                target_modules=lora.target_modules,
                exclude_modules=lora.exclude_modules,
                task_type="CAUSAL_LM",
            )
            inject_adapter_in_model(adapted, model, low_cpu_mem_usage=True)
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        text = config.get_text_config()
        heads = text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        experts, inner = getattr(text, "num_experts_per_tok", None) or 1, text.intermediate_size
        return cls(
            parameters=whole + (trained if lora is not None else 0),
            trained=trained,
            root=whole - sum(counts),
            layer=max(counts, default=whole),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            queries=heads * head,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * head,
            head=head,
            inner=experts * (getattr(text, "moe_intermediate_size", None) or inner),
            vocabulary=text.vocab_size,
        )

    def with_value_head(self) -> Self:
        """The same model with a number as its head."""
        head = self.vocabulary * self.hidden
        if self.root < 2 * head:  # the embedding stays
            return self
        trained = self.trained - head * (self.trained == self.parameters)
        return self._replace(parameters=self.parameters - head, trained=trained, root=self.root - head)

    @classmethod
    def read(cls, path: str, lora: LoraSettings | None = None, *, download: bool = False) -> Self:
        """Count a model by the `config.json` of a folder or Hugging Face id. Raises OSError and ValueError."""
        from transformers import AutoConfig

        return cls.of(AutoConfig.from_pretrained(path, local_files_only=not download), lora)


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one rank on its GPU."""

    parts: Mapping[str, int]
    """At the peak of an update, by name."""
    resting: int
    """Between updates, when engines have the GPU."""

    @property
    def exact(self) -> int:
        """The part of the peak that follows from the number of parameters."""
        return sum(self.parts.get(name, 0) for name in ("weights", "gradients", "moments", "other models"))

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """The peak and its parts."""
        parts = ", ".join(f"{name} {gib(count)}" for name, count in self.parts.items() if count)
        return f"{gib(self.peak)} at the peak of an update ({parts}), {gib(self.resting)} between updates"


@dataclass(frozen=True)
class EngineMemory:
    """An engine on one of its GPUs."""

    weights: int
    """Bytes."""
    token: int
    """Bytes of a token's KV cache."""
    longest: int
    """Most tokens of a sequence."""
    share: float | None
    """Share of the GPU that the engine takes, or None for the embedded engine, which takes what it needs."""
    sequences: int
    """Most sequences at a time."""
    sleeps: bool
    """It gives its memory to the learner during updates."""

    @classmethod
    def of(
        cls,
        size: ModelSize,
        *,
        gpus: int,
        longest: int,
        share: float | None,
        sequences: int,
        sleeps: bool,
        value_bytes: int = 2,
    ) -> Self:
        """Forecast an engine of a model on one of its `gpus`."""
        base = size.parameters - size.trained * (size.trained < size.parameters)  # engines merge an adapter, or add it
        token = 2 * size.layers * max(size.keys // gpus, size.head) * value_bytes
        return cls(base * value_bytes // gpus, token, longest, share, sequences, sleeps)

    def taken(self, total: int) -> int:
        """Bytes of a GPU of `total` bytes that the engine takes while it is awake."""
        reserved = self.weights + self.token * self.longest * self.sequences + CONTEXT_BYTES
        return reserved if self.share is None else int(self.share * total)

    def cached_tokens(self, total: int) -> int:
        """Tokens for whose KV cache there is memory."""
        return max(0, self.taken(total) - self.weights - CONTEXT_BYTES) // self.token

    def words(self, total: int | None) -> str:
        """Return what the engine takes of a GPU of `total` bytes, or None for an unknown GPU."""
        if total is None and self.share is not None:
            return f"{self.share:.0%} of its GPU while it generates: weights {gib(self.weights)}, the rest for KV cache"
        return (
            f"{gib(self.taken(total or 0))} while it generates (weights {gib(self.weights)}, KV cache of "
            f"{self.cached_tokens(total or 0)} tokens)"
        )


def learner_memory(config: LearnerConfig, placement: Placement, size: ModelSize, critic: ModelSize) -> LearnerMemory:
    """Forecast one rank of a learner. `critic` is the size of the value model, if the run trains one."""
    ranks, actor, fsdp = placement.ranks, config.actor, config.actor.fsdp_config
    sharing = _sharing(fsdp, ranks)
    tokens = _tokens(config, config.update_limit, ranks)
    policy = _Trained.of(config, size, fsdp, ranks, config.model.enable_gradient_checkpointing, tokens)
    chunk = actor.fsdp_config.entropy_from_logits_chunk_size
    whole = {True: 0, False: tokens, None: WHOLE_LOGITS // size.vocabulary}[config.model.use_fused_kernels]
    existing = chunk if tokens > max(chunk, whole) else tokens
    compute = 2 if config.dtype == "bfloat16" else BYTES[config.dtype]
    head = 4 if config.float32_head and compute == 2 else compute
    logits = existing * size.vocabulary * (2 * head + 12 + 4 * config.uses_full_kl)
    reference = 0
    if config.uses_reference and config.lora is None:
        weights = _weight(config, config.ref.fsdp_config) * size.parameters // sharing
        reference = weights if config.uses_full_kl or not config.ref.fsdp_config.param_offload else 0
    values = config.value_model
    other = None
    if values is not None:
        rows = _tokens(config, values.limit, ranks)
        other = _Trained.of(config, critic, values.model.sharding, ranks, values.model.gradient_checkpointing, rows)
    beside = reference + (other.resting if other is not None else 0)
    phases = [
        policy.computing | {"logits": logits, "other models": beside},
        policy.stepping | {"other models": beside},
    ]
    if other is not None:
        resting = reference + policy.resting
        phases += [other.computing | {"other models": resting}, other.stepping | {"other models": resting}]
    phase = max(phases, key=lambda parts: sum(parts.values()))
    resting = policy.resting + beside - (reference if config.ref.fsdp_config.param_offload else 0)
    return LearnerMemory({**phase, "context": CONTEXT_BYTES}, resting + CONTEXT_BYTES)


class _Trained(NamedTuple):
    """Bytes of a model that is trained, by part."""

    resting: int
    computing: dict[str, int]
    stepping: dict[str, int]

    @classmethod
    def of(
        cls, config: LearnerConfig, size: ModelSize, fsdp: ShardingConfig, ranks: int, checkpoints: bool, tokens: int
    ) -> Self:
        width, sharing = _weight(config, fsdp), _sharing(fsdp, ranks)
        offloads = fsdp.param_offload or fsdp.offload_policy
        in_main_memory = offloads and ranks > 1  # FSDP2 then steps the optimizer there too
        weights, gradients = (0 if in_main_memory else width * n // sharing for n in (size.parameters, size.trained))
        moments = 2 * gradients
        keeps_moments = not (fsdp.optimizer_offload or fsdp.offload_policy)
        compute = 2 if config.dtype == "bfloat16" else width
        gathers = 2 if fsdp.is_gathered_in_bfloat16 and compute == 2 else width
        hidden = gathers if ranks > 1 else width
        layer = tokens * ((5 * compute + 4 * hidden) * size.hidden + compute * _inside(size))
        kept = tokens * size.layers * size.hidden * hidden + layer if checkpoints else size.layers * layer
        held = {"weights": weights, "gradients": gradients}
        computing = held | {
            "moments": moments if keeps_moments else 0,
            "gathered": _gathered(size, gathers, fsdp)
            if ranks > 1
            else _cast(size, compute, width, checkpoints, config.float32_head),
            "activations": kept,
        }
        resting = (0 if offloads else weights) + (moments if keeps_moments else 0)
        return cls(resting, computing, held | {"moments": moments})


def _inside(size: ModelSize) -> int:
    """Values of a token inside a layer: of its attention, and of its feed-forward part."""
    return 2 * size.queries + 2 * size.keys + 4 * size.inner


def _gathered(size: ModelSize, width: int, fsdp: ShardingConfig) -> int:
    weights = size.root + 2 * size.layer if fsdp.reshard_after_forward else size.parameters
    if size.trained < size.parameters:  # the gradients of an adapter are small
        return width * weights
    return width * (weights + size.root + size.layer) + 4 * size.layer * (width == 2)  # gradients are summed in float32


def _cast(size: ModelSize, compute: int, width: int, checkpoints: bool, float32_head: bool) -> int:
    """Bytes of the copies that autocast makes of weights, and autograd keeps."""
    if compute == width:
        return 0
    head = 0 if float32_head else size.vocabulary * size.hidden
    return compute * ((1 if checkpoints else size.layers) * size.layer + head)


def _weight(config: LearnerConfig, section: WeightsConfig) -> int:
    return 2 if section.is_bfloat16 else BYTES["float64" if config.dtype == "float64" else "float32"]


def _sharing(fsdp: ShardingConfig, ranks: int) -> int:
    return fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks


def _tokens(config: LearnerConfig, limit: PassLimit, ranks: int) -> int:
    """Most tokens of one rank's pass."""
    parts = config.sequence_parallel_size if ranks > 1 else 1
    longest = -(-(config.max_prompt_length + config.max_response_length) // parts)
    rows = -(-config.mini_batch_size * parts // ranks)
    if limit.tokens is None:
        return longest * min(rows, limit.rows or rows)
    return min(max(limit.tokens, longest), longest * rows)


def shortages(learner: LearnerMemory | None, engine: EngineMemory | None, total: int) -> list[str]:
    """Why a GPU of `total` bytes is too small, from exact figures alone: the run would fail there.

    Either may be None, for a GPU that the other one has alone.
    """
    problems: list[str] = []
    if learner is not None and learner.exact > total:
        problems.append(
            f"expected at most {gib(total)}, the GPU's memory, for the learner's weights, gradients and moments, got "
            f"{gib(learner.exact)}; raise trackway.learner_ranks, or set actor.fsdp_config.param_offload and "
            "optimizer_offload"
        )
    if engine is not None:
        needed = engine.weights + engine.token * engine.longest + CONTEXT_BYTES
        if needed > min(engine.taken(total), total):
            problems.append(
                f"expected at least {gib(needed)} for an engine's weights and the KV cache of {engine.longest} tokens, "
                f"got {gib(min(engine.taken(total), total))} of the GPU's {gib(total)}; raise "
                "rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size, or lower rollout.max_model_len"
            )
    if learner is not None and engine is not None and learner.resting + engine.taken(total) > total:
        problems.append(
            f"expected at most {gib(max(0, total - engine.taken(total)))} for the learner while engines are awake, got "
            f"{gib(learner.resting)}; set actor.fsdp_config.param_offload and optimizer_offload and "
            "ref.fsdp_config.param_offload, or lower rollout.gpu_memory_utilization"
        )
    return problems


def doubt(learner: LearnerMemory, engine: EngineMemory | None, total: int) -> str:
    """Why the peak of an update may not fit into a GPU of `total` bytes. Empty where it is forecast to fit."""
    beside = 0 if engine is None else CONTEXT_BYTES if engine.sleeps else engine.taken(total)
    if learner.peak + beside <= total:
        return ""
    return (
        f"whether an update fits into {gib(total)}: its peak is forecast as {gib(learner.peak)}, of which "
        f"{gib(learner.peak - learner.exact)} are estimates. {ADVICE}"
    )


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"


def with_advice(error: Exception, config: LearnerConfig, placement: Placement) -> None:
    """End the traceback of PyTorch's OutOfMemoryError with the keys that help, and what was forecast."""
    if type(error).__name__ != "OutOfMemoryError":  # the process of a run imports torch late
        return
    error.add_note(ADVICE)
    try:
        forecast = forecast_learner(config, placement)
    except (OSError, ValueError):
        return
    error.add_note(f"Forecast for each GPU of the learner: {forecast.words}.")


def forecast_learner(config: LearnerConfig, placement: Placement, *, download: bool = False) -> LearnerMemory:
    """Forecast one rank of a learner. Raises OSError and ValueError for a model that cannot be read."""
    size, values = ModelSize.read(config.model_path, config.lora, download=download), config.value_model
    critic = size if values is None else ModelSize.read(values.model.path, values.model.lora, download=download)
    return learner_memory(config, placement, size, critic.with_value_head())
