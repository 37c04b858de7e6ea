"""A LoRA adapter as PEFT writes it: what an engine must know of it, and its merge into the base weights.

An adapted layer computes W x + s B A x with s = alpha / rank (Hu et al., 2021, arXiv 2106.09685). A server that knows
no layer of an adapter's name may load it without an error and answer as the base model, so names and shapes are
compared with the base's first.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor, dtype

from trackway.rollout.engines.weight_folder import EMBEDDING, HEAD, tensors
from trackway.wire.errors import ErrorCode, TrackwayError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_PLAIN = {"use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}}
_PLAIN |= {"alpha_pattern": {}, "fan_in_fan_out": False}
_SHOWN = 3


class AdapterInfo(NamedTuple):
    """The configuration of an adapter, and the base weights that it changes."""

    rank: int
    scale: float
    """alpha / rank."""
    layers: list[str]


def is_adapter(folder: Path) -> bool:
    """Return whether the folder has an adapter instead of whole weights."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path, base: Path) -> AdapterInfo:
    """Read what the adapter changes. Raises WEIGHTS_CORRUPT unless it is plain LoRA for layers of the base."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        rank, scale = int(config["r"]), float(config["lora_alpha"]) / int(config["r"])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise _refused(f"expected PEFT's {CONFIG} in {folder}, got {type(error).__name__}: {error}") from error
    if other := [name for name, value in _PLAIN.items() if config.get(name, value) not in (value, None)]:
        raise _refused(f"expected a plain LoRA adapter in {folder}, got one with {', '.join(other)}")
    saved, weights = tensors(folder), tensors(base)
    layers = [name.removeprefix(_PREFIX).removesuffix(_A) for name in saved if name.endswith(_A)]
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        weight = weights.get(f"{layer}.weight")
        rows, columns = weight.shape if weight is not None and len(weight.shape) == 2 else (0, 0)
        wanted |= {f"{_PREFIX}{layer}{_A}": (rank, columns), f"{_PREFIX}{layer}{_B}": (rows, rank)}
    got = {name: tensor.shape for name, tensor in saved.items()}
    wrong = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    if wrong or not layers:
        shown = ", ".join(wrong[:_SHOWN]) + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        raise _refused(
            f"expected the adapter in {folder} to have two matrices of rank {rank} for layers of {base}, got another "
            f"name or shape in {shown or 'no layer'}"
        )
    return AdapterInfo(rank, scale, layers)


def adaptable_layers(base: Path) -> list[str]:
    """The last parts of the names of the base's matrices, without embedding and head."""
    matrices = [name for name, tensor in tensors(base).items() if len(tensor.shape) == 2]
    return sorted({name.split(".")[-2] for name in matrices if name != HEAD and not name.endswith(EMBEDDING)})


def merge_adapter(weights: dict[str, Tensor], folder: Path, base: Path) -> dict[str, Tensor]:
    """The base's weights with the adapter's update, which is computed and added in float32. Raises WEIGHTS_CORRUPT."""
    info, saved = read_adapter(folder, base), load_file(folder / WEIGHTS)
    merged = dict(weights)
    for layer in info.layers:
        a, b = saved[f"{_PREFIX}{layer}{_A}"].float(), saved[f"{_PREFIX}{layer}{_B}"].float()
        merged[f"{layer}.weight"] = weights[f"{layer}.weight"].float() + b @ a * info.scale
    return merged


def write_merged(adapter: Path, base: Path, folder: Path, as_dtype: dtype) -> Path:
    """Writes the base model with the adapter in its weights, `lm_head.weight` included, to a new folder."""
    weights = {name: tensor for file in sorted(base.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    merged = {name: tensor.to(as_dtype) for name, tensor in merge_adapter(weights, adapter, base).items()}
    embedding = next((name for name in merged if name.endswith(EMBEDDING)), None)
    if HEAD not in merged and embedding is not None:
        merged[HEAD] = merged[embedding].clone()
    folder.mkdir(parents=True)
    for file in base.glob("*.json"):
        if not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, folder / file.name)
    save_file(merged, folder / "model.safetensors", {"format": "pt"})
    return folder


def _refused(reason: str) -> TrackwayError:
    remedy = "publish one of the served model, or set actor_rollout_ref.model.lora.merge=true"
    return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, f"{reason}; {remedy}")
