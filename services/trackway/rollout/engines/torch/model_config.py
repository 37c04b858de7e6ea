"""The shape of a decoder, read from a Hugging Face folder without importing transformers.

Qwen2, Qwen3 and Llama are one decoder with three switches: bias on q/k/v, bias on o, and a norm on q and k.
Unimplemented features that would change the result (other activations, scaled rotary, sliding windows) are rejected.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from trackway.wire.errors import ErrorCode, TrackwayError

_FAMILIES = {"qwen2", "qwen3", "llama"}


class _Rope(BaseModel):
    rope_theta: float = 10000.0
    rope_type: str = "default"


class _ConfigFile(BaseModel):
    """The `config.json` keys in use; transformers 5 writes `rope_parameters`, 4 wrote `rope_theta`."""

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
    tie_word_embeddings: bool = False
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
    """Sizes and switches of the decoder; counts are in the units of their names."""

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
            max_positions=file.max_position_embeddings,
            norm_eps=file.rms_norm_eps,
            rope_theta=rope.rope_theta,
            qkv_bias=file.attention_bias or file.model_type == "qwen2",
            o_bias=file.attention_bias and file.model_type != "qwen2",
            qk_norm=file.model_type == "qwen3",
            tied=file.tie_word_embeddings,
            eos_token_ids=_eos_ids(folder, file),
        )


def _text(path: Path) -> str:
    if not path.is_file():
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected a Hugging Face model folder with {path.name}, got no such file in {path.parent}; set model_path",
        )
    return path.read_text()


def _refuse_unsupported(file: _ConfigFile, folder: Path) -> None:
    rope_type = file.rope_parameters.rope_type if file.rope_parameters else "default"
    supported = {
        f"model_type {file.model_type}": file.model_type in _FAMILIES,
        f"hidden_act {file.hidden_act}": file.hidden_act == "silu",
        f"rope_type {rope_type}": rope_type == "default" and not file.rope_scaling,
        "mlp_bias": not file.mlp_bias,
        "sliding windows": not file.use_sliding_window and set(file.layer_types or []) <= {"full_attention"},
    }
    refused = [name for name, ok in supported.items() if not ok]
    if refused:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected a plain decoder of {sorted(_FAMILIES)}, got {', '.join(refused)} in {folder}; "
            "the embedded engine cannot run it: choose another engine",
        )


def _eos_ids(folder: Path, file: _ConfigFile) -> frozenset[int]:
    path = folder / "generation_config.json"
    eos_token_id = _GenerationFile.model_validate(json.loads(path.read_text())).eos_token_id if path.is_file() else None
    ids = file.eos_token_id if eos_token_id is None else eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])
