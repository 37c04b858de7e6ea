"""A safetensors file written one tensor after another, so that they need not exist in memory together.

The format (https://github.com/huggingface/safetensors): the length of the header in 8 bytes, the header as JSON with
the place of each tensor, then their bytes. As in the library's own files, larger types come first, so that each tensor
is aligned.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = list(_TYPES)
DTYPES = {name: dtype for dtype, name in _TYPES.items()}
"""Types by their names in a header."""
SHARDS, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Names in the header's metadata, as PyTorch's HuggingFaceStorageWriter has them."""


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order of their bytes in a file."""
    return dict(sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])))


def write_tensors(
    file: Path,
    like: Mapping[str, Tensor],
    complete: Iterable[Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
) -> None:
    """Writes the tensors that `complete` yields, of the names, types and shapes of `like`, both in file order.

    `offsets` are the places of shards in the tensors that they are parts of. None for whole tensors. `metadata` is the
    header's. A `durable` file is on disk when this returns.
    """
    header: dict[str, Mapping[str, object]] = {} if metadata is None else {"__metadata__": metadata}
    if offsets is not None:
        places = {name: {OFFSETS: list(place)} for name, place in offsets.items()}
        header["__metadata__"] = {"format": "pt", SHARDS: json.dumps(places)}
    end = 0
    for name, tensor in like.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for tensor in complete:
            output.write(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if durable:
            output.flush()
            os.fsync(output.fileno())
