"""The shape of a decoder, read from a Hugging Face folder without importing transformers.

Qwen2, Qwen3, Llama, Mistral, Phi-3 and Gemma are one decoder with switches: bias on q/k/v, bias on o, a norm on q and
k, fused checkpoints (Phi-3), and Gemma's activation, scaled embedding and norms around 1. Unimplemented features that
would change the result (other activations, scaled rotary, Gemma 2's soft caps) are rejected. A sliding window over all
layers bounds the length of sequences instead: up to it, attention is whole.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from trackway.wire.errors import ErrorCode, TrackwayError

_ACTIVATIONS = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "phi3"), ("silu",)),
    "gemma": ("gelu_pytorch_tanh", "gelu"),  # its first configurations say gelu and mean the approximation
}
"""The activations of each model type."""
_WINDOWED = {"mistral", "phi3"}
"""Model types whose `sliding_window` applies to every layer."""


class _Rope(BaseModel):
    rope_theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0


class _ConfigFile(BaseModel):
    """The `config.json` keys in use. transformers 5 writes `rope_parameters`, 4 wrote `rope_theta`."""

    model_config = ConfigDict(extra="ignore")

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: dict[str, object] | None = None
    rope_theta: float = 10000.0
    eos_token_id: int | list[int] | None = None


class _GenerationFile(BaseModel):
    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of the decoder. Counts are in the units of their names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    fused: bool
    """True if checkpoints hold q/k/v, and gate and up, as one matrix each."""
    gemma: bool
    """True if it has Gemma's activation, scaled embedding, and norms whose weights are offsets from 1."""
    tied: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads `config.json`, and `generation_config.json` for the stop ids; INVALID_REQUEST if unsupported."""
        file = _ConfigFile.model_validate_json(_text(folder / "config.json"))
        _refuse_unsupported(file, folder)
        rope = file.rope_parameters or _Rope(rope_theta=file.rope_theta)
        return cls(
            vocab_size=file.vocab_size,
            hidden_size=file.hidden_size,
            intermediate_size=file.intermediate_size,
            num_layers=file.num_hidden_layers,
            num_heads=file.num_attention_heads,
            num_kv_heads=file.num_key_value_heads or file.num_attention_heads,
            head_dim=file.head_dim or file.hidden_size // file.num_attention_heads,
            max_positions=_longest(file),
            norm_eps=file.rms_norm_eps,
            rope_theta=rope.rope_theta,
            qkv_bias=file.attention_bias or file.model_type == "qwen2",
            o_bias=file.attention_bias and file.model_type != "qwen2",
            qk_norm=file.model_type == "qwen3",
            fused=file.model_type == "phi3",
            gemma=file.model_type == "gemma",
            tied=file.model_type == "gemma" if file.tie_word_embeddings is None else file.tie_word_embeddings,
            eos_token_ids=_eos_ids(folder, file),
        )


def _longest(file: _ConfigFile) -> int:
    window = file.sliding_window if file.model_type in _WINDOWED else None
    return file.max_position_embeddings if window is None else min(file.max_position_embeddings, window)


def _text(path: Path) -> str:
    if not path.is_file():
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected a Hugging Face model folder with {path.name}, got no such file in {path.parent}; set model_path "
            "(TRACKWAY_MODEL_PATH)",
        )
    return path.read_text()


def _refuse_unsupported(file: _ConfigFile, folder: Path) -> None:
    rope_type = file.rope_parameters.rope_type if file.rope_parameters else "default"
    rotated = min(
        file.partial_rotary_factor, file.rope_parameters.partial_rotary_factor if file.rope_parameters else 1.0
    )
    layers = {"full_attention", "sliding_attention"} if file.model_type in _WINDOWED else {"full_attention"}
    activations = _ACTIVATIONS.get(file.model_type)
    supported = {
        f"model_type {file.model_type}": activations is not None,
        f"hidden_act {file.hidden_act}": activations is None or file.hidden_act in activations,
        f"partial_rotary_factor {rotated}": rotated == 1.0,
        f"rope_type {rope_type}": rope_type == "default" and not file.rope_scaling,
        "mlp_bias": not file.mlp_bias,
        "sliding windows": not file.use_sliding_window and set(file.layer_types or []) <= layers,
    }
    refused = [name for name, ok in supported.items() if not ok]
    if refused:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected a model_type of {sorted(_ACTIVATIONS)} for the embedded engine, got {', '.join(refused)} in "
            f"{folder}; run this model with engine: vllm or sglang",
        )


def _eos_ids(folder: Path, file: _ConfigFile) -> frozenset[int]:
    path = folder / "generation_config.json"
    eos_token_id = _GenerationFile.model_validate(json.loads(path.read_text())).eos_token_id if path.is_file() else None
    ids = file.eos_token_id if eos_token_id is None else eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])
