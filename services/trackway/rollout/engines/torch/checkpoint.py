"""Safetensors files to decoder weights. Every name and shape is checked before a tensor is used."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trackway.rollout.engines.adapter_folder import merge_adapter
from trackway.rollout.engines.torch.decoder import DecoderWeights, LayerWeights
from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.rollout.engines.weight_folder import not_finite
from trackway.wire.errors import ErrorCode, TrackwayError

LM_HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"

QKV = "self_attn.qkv_proj.weight"
GATE_UP = "mlp.gate_up_proj.weight"
"""Names of fused matrices in checkpoints of Phi-3."""

Shapes = dict[str, tuple[int, ...]]


def read_weights(
    folder: Path, config: DecoderConfig, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
) -> DecoderWeights:
    """The weights in the folder's `*.safetensors`, with an adapter merged into them.

    Raises WEIGHTS_CORRUPT when names or shapes are not the model's, or a value is NaN or infinite in `dtype`.
    """
    tensors = _read_tensors(folder)
    check(tensors, config, folder)
    if adapter is not None:
        tensors = merge_adapter(tensors, adapter, folder)
    placed = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    require_finite(placed, adapter or folder)
    return _fuse(placed, config)


def expected_shapes(config: DecoderConfig) -> Shapes:
    """Name and shape of every tensor of a Hugging Face checkpoint of this model, `lm_head.weight` included."""
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    matrices = {
        QKV: {f"self_attn.{name}_proj.weight": (size, hidden) for name, size in (("q", q), ("k", kv), ("v", kv))},
        GATE_UP: {f"mlp.{name}_proj.weight": (config.intermediate_size, hidden) for name in ("gate", "up")},
    }
    for fused, parts in matrices.items():
        layer |= {fused: (sum(rows for rows, _ in parts.values()), hidden)} if config.fused else parts
    if config.qkv_bias:
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
    if config.o_bias:
        layer |= {"self_attn.o_proj.bias": (hidden,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes: Shapes = {EMBED: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {LM_HEAD: (config.vocab_size, hidden)}


def check(tensors: dict[str, Tensor], config: DecoderConfig, folder: Path) -> None:
    """Raises WEIGHTS_CORRUPT unless the tensors are exactly the model's. A tied `lm_head.weight` may be absent."""
    want = expected_shapes(config)
    if config.tied and LM_HEAD not in tensors:
        del want[LM_HEAD]
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"{name} (expected {want.get(name)}, got {got.get(name)})" for name in sorted(want.keys() | got.keys())
             if want.get(name) != got.get(name)]  # fmt: skip
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise TrackwayError(
            ErrorCode.WEIGHTS_CORRUPT,
            f"weights in {folder} do not fit the served model: {shown}; publish weights of the same architecture",
            tensors=len(wrong),
        )


def require_finite(tensors: dict[str, Tensor], folder: Path) -> None:
    """Raises WEIGHTS_CORRUPT unless all values are finite, which their sums show, overflow aside."""
    sums = torch.stack(
        [tensor.sum(dtype=tensor.dtype) for tensor in tensors.values()]
    )  # one synchronization with the device
    suspects = [name for name, finite in zip(tensors, sums.isfinite().tolist(), strict=True) if not finite]
    if bad := [name for name in suspects if not bool(tensors[name].isfinite().all())]:
        raise not_finite(bad, folder)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise TrackwayError(
                ErrorCode.WEIGHTS_CORRUPT, f"expected a safetensors file at {path}, got {error}; publish it again"
            ) from error
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _fuse(tensors: dict[str, Tensor], config: DecoderConfig) -> DecoderWeights:
    layers = (_layer(tensors, f"model.layers.{index}.", config) for index in range(config.num_layers))
    return DecoderWeights(
        embed=tensors[EMBED],
        layers=tuple(layers),
        norm=tensors["model.norm.weight"],
        lm_head=tensors.get(LM_HEAD, tensors[EMBED]),
    )


def _layer(tensors: dict[str, Tensor], prefix: str, config: DecoderConfig) -> LayerWeights:
    def get(name: str) -> Tensor:
        return tensors[prefix + name]

    def qkv(kind: str) -> Tensor:
        return torch.cat([get(f"self_attn.{name}_proj.{kind}") for name in ("q", "k", "v")])

    def qk_norm() -> Tensor:
        q, k = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    return LayerWeights(
        input_norm=get("input_layernorm.weight"),
        qkv=get(QKV) if config.fused else qkv("weight"),
        qkv_bias=qkv("bias") if config.qkv_bias else None,
        qk_norm=qk_norm() if config.qk_norm else None,
        o=get("self_attn.o_proj.weight"),
        o_bias=get("self_attn.o_proj.bias") if config.o_bias else None,
        mlp_norm=get("post_attention_layernorm.weight"),
        gate_up=get(GATE_UP) if config.fused else torch.cat((get("mlp.gate_proj.weight"), get("mlp.up_proj.weight"))),
        down=get("mlp.down_proj.weight"),
    )
