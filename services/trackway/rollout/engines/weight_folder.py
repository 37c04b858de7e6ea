"""A folder of weights or of a LoRA adapter: what an engine must know of it, and its merge into the base weights.

A file of safetensors has the header's length in 8 bytes, the JSON header (name: dtype, shape, offsets), and the bytes
of the tensors. The missing head of a tied model is added.

PEFT writes adapters. An adapted layer computes W x + s B A x with s = alpha / rank (Hu et al., 2021, arXiv 2106.09685).
A server that knows no layer of an adapter's name may load it without an error and answer as the base model, so names
and shapes are compared with the base's first.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trackway.wire.errors import ErrorCode, TrackwayError

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
_HEAD_FILE = "lm_head.safetensors"
_INDEX = "model.safetensors.index.json"

SHOWN_TENSORS = 5
_FLOATS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""For each safetensors type its bits as a number, and the smallest value, sign aside, that is not a finite number."""
_PART = 1 << 18
"""Values checked at a time, so that the masked copy stays in the CPU's cache."""


class Tensor(NamedTuple):
    """The location, type and shape of a tensor."""

    name: str
    file: Path
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name. Raises WEIGHTS_CORRUPT for none, or a file that is not safetensors."""
    by_name: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            by_name.update(_header(file))
    except (OSError, ValueError, KeyError) as error:
        message = f"expected safetensors in {folder}, got {type(error).__name__}: {error}; publish the weights again"
        raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message) from error
    if not by_name:
        raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, f"expected safetensors in {folder}, got none; was it pruned?")
    return by_name


def check_same_model(folder: Path, base: Path) -> None:
    """Raises WEIGHTS_CORRUPT unless the folder has every tensor of the base in its shape."""
    got, want = tensors(folder), tensors(base)
    for name, tensor in want.items():
        shape = got[name].shape if name in got else "none"
        if shape != tensor.shape:
            raise TrackwayError(
                ErrorCode.WEIGHTS_CORRUPT,
                f"expected {name} of shape {tensor.shape} in {folder}, got {shape}; publish all weights of {base}",
            )


def check_finite(folder: Path) -> None:
    """Raises WEIGHTS_CORRUPT when a value of the folder's safetensors is NaN or infinite.

    Other files and unknown number types are left to the server that loads them.
    """
    if not any(folder.glob("*.safetensors")):
        return
    if bad := [name for name, tensor in tensors(folder).items() if not _is_finite(tensor)]:
        raise not_finite(bad, folder)


def not_finite(names: Sequence[str], folder: Path) -> TrackwayError:
    """The error for weights that hold NaN or infinities in these tensors."""
    shown = ", ".join(names[:SHOWN_TENSORS])
    more = f" and {len(names) - SHOWN_TENSORS} more" if len(names) > SHOWN_TENSORS else ""
    message = f"expected finite weights in {folder}, got NaN or infinities in {shown}{more}; publish finite weights"
    return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message, tensors=len(names))


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite: NaN and infinities have the largest bit patterns, sign aside."""
    if tensor.dtype not in _FLOATS or tensor.start == tensor.end:
        return True
    kind, first = _FLOATS[tensor.dtype]
    size = np.dtype(kind).itemsize
    bits = np.memmap(tensor.file, kind, "r", tensor.start, ((tensor.end - tensor.start) // size,))
    without_sign = np.array(2 ** (8 * size - 1) - 1, kind)
    parts = (bits[start : start + _PART] for start in range(0, len(bits), _PART))
    return all(int((part & without_sign).max()) < first for part in parts)


def lacks_head(folder: Path, base: Path) -> bool:
    """Return whether the folder omits the output head because the base ties it to the embedding."""
    config = json.loads((base / "config.json").read_text())
    tied = {**config, **config.get("text_config", {})}.get("tie_word_embeddings", False)
    return bool(tied) and HEAD not in tensors(folder)


def with_head(folder: Path, into: Path) -> Path:
    """Links the folder's files in `into`, and adds its embedding as `lm_head.weight`. Raises WEIGHTS_CORRUPT."""
    if (folder / _HEAD_FILE).exists():  # it would be written to through its link
        message = f"expected {_HEAD_FILE} to hold {HEAD}, got other tensors in {folder}; publish the weights again"
        raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).symlink_to(file.resolve())
    embedding = next(tensor for name, tensor in tensors(folder).items() if name.endswith(EMBEDDING))
    _write(into / _HEAD_FILE, embedding)
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
        index["weight_map"][HEAD] = _HEAD_FILE
        (into / _INDEX).unlink()
        (into / _INDEX).write_text(json.dumps(index))
    return into


def _header(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size - 8:
            raise ValueError(f"{path.name} is cut short")
        header: dict[str, Any] = json.loads(file.read(size))
    begin = 8 + size
    entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
    return {name: _tensor(name, path, begin, entry) for name, entry in entries}


def _tensor(name: str, path: Path, begin: int, entry: dict[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    return Tensor(name, path, begin + start, begin + end, entry["dtype"], tuple(entry["shape"]))


def _write(path: Path, tensor: Tensor) -> None:
    size = tensor.end - tensor.start
    entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, size]}
    header = json.dumps({HEAD: entry}).encode()
    with tensor.file.open("rb") as source, path.open("wb") as target:
        source.seek(tensor.start)
        target.write(len(header).to_bytes(8, "little") + header)
        target.write(source.read(size))


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


def merge_adapter(weights: dict[str, torch.Tensor], folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """The base's weights with the adapter's update, which is computed and added in float32. Raises WEIGHTS_CORRUPT."""
    info, saved = read_adapter(folder, base), load_file(folder / WEIGHTS)
    merged = dict(weights)
    for layer in info.layers:
        a, b = saved[f"{_PREFIX}{layer}{_A}"].float(), saved[f"{_PREFIX}{layer}{_B}"].float()
        merged[f"{layer}.weight"] = weights[f"{layer}.weight"].float() + b @ a * info.scale
    return merged


def write_merged(adapter: Path, base: Path, folder: Path, as_dtype: torch.dtype) -> Path:
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
