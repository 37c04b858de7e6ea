"""A LoRA adapter as the folder that PEFT writes and loads: `adapter_config.json` and `adapter_model.safetensors`.

A model with an adapter calls its matrices `<layer>.lora_A.default.weight`. The folder has the same without the name of
the adapter, below `base_model.model`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, JsonValue, ValidationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _NAMED, _UNNAMED = "base_model.model.", ".default.weight", ".weight"
T = TypeVar("T")


class AdapterConfig(BaseModel):
    """The keys of adapter_config.json that decide what an adapter computes."""

    peft_type: str = "LORA"
    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    task_type: str | None = "CAUSAL_LM"
    bias: str = "none"
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, JsonValue] = Field(default_factory=dict)
    alpha_pattern: dict[str, JsonValue] = Field(default_factory=dict)


def folder_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors of a model's adapter by their names in the folder."""
    return {f"{_PREFIX}{name.removesuffix(_NAMED)}{_UNNAMED}": tensor for name, tensor in tensors.items()}


def model_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors of a folder by their names in the model."""
    return {f"{name.removeprefix(_PREFIX).removesuffix(_UNNAMED)}{_NAMED}": t for name, t in tensors.items()}


def layers_of(names: Mapping[str, object]) -> list[str]:
    """The adapted layers of tensors by their names in the model."""
    return sorted({name.partition(".lora_")[0] for name in names})


def read_config(folder: Path, rank: int, alpha: float) -> AdapterConfig:
    """The configuration of an adapter that this rank and alpha describe completely.

    Raises ValueError for another one, and OSError for a folder without one.
    """
    try:
        config = AdapterConfig.model_validate_json((folder / CONFIG).read_bytes())
    except ValidationError as error:
        raise ValueError(f"expected PEFT's {CONFIG} in {folder}, got {error.error_count()} errors in it") from error
    plain = AdapterConfig(r=rank, lora_alpha=alpha).model_dump()
    free = {"target_modules", "base_model_name_or_path", "task_type", "lora_dropout"}
    differing = [name for name, value in config.model_dump().items() if name not in free and value != plain[name]]
    if differing:
        told = ", ".join(f"{name} {getattr(config, name)} instead of {plain[name]}" for name in differing)
        raise ValueError(
            f"expected the adapter {folder} to have the rank and alpha of the run and no other options, got {told}; "
            "set model.lora_rank and model.lora_alpha to its own, or merge it into the model"
        )
    return config


def write_config(folder: Path, config: AdapterConfig) -> None:
    """Writes adapter_config.json."""
    (folder / CONFIG).write_text(json.dumps({**config.model_dump(), "inference_mode": True}, indent=2) + "\n")
