"""Reads a GGUF file of a Llama: its metadata, and its tensors as float32 under the names that transformers uses.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the blocks of quantised tensors in
ggml's `ggml-quants.c`.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Type number of a metadata value -> its struct format."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GgufError(ValueError):
    """The file is not a GGUF that this module can read."""


class _Encoding(NamedTuple):
    """How a tensor's values are stored: in blocks of `values` numbers and `size` bytes."""

    values: int
    size: int
    decode: Callable[[NDArray[np.uint8]], Floats]
    """[blocks, size] bytes -> [blocks, values]."""


def _scale(blocks: NDArray[np.uint8], start: int) -> Floats:
    """[blocks, 1]: the float16 that begins at byte `start` of each block."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _q4_1(blocks: NDArray[np.uint8]) -> Floats:
    low, high = blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4
    return _scale(blocks, 0) * np.concatenate([low, high], axis=1).astype(np.float32) + _scale(blocks, 2)


def _q8_0(blocks: NDArray[np.uint8]) -> Floats:
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


_ENCODINGS = {
    0: _Encoding(1, 4, lambda blocks: blocks.view(np.float32)),
    1: _Encoding(1, 2, lambda blocks: blocks.view(np.float16).astype(np.float32)),
    3: _Encoding(32, 20, _q4_1),
    8: _Encoding(32, 34, _q8_0),
}
"""By ggml's type number: F32, F16, Q4_1, Q8_0."""


class _Info(NamedTuple):
    """Where a tensor is."""

    shape: tuple[int, ...]
    """As in numpy: the last axis is contiguous."""
    encoding: int
    offset: int
    """Bytes after the start of the data."""


class Gguf:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Reads everything but the tensors' data. Raises GgufError for a file of another kind."""
        self._bytes = np.memmap(path, np.uint8, "r")
        self._at = 0
        if bytes(self._bytes[:4]) != b"GGUF":
            raise GgufError(f"expected a GGUF file, got one that starts with {bytes(self._bytes[:4])!r}: {path}")
        self._at = 4
        version, tensors, values = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version not in _VERSIONS:
            raise GgufError(f"expected GGUF version {' or '.join(map(str, _VERSIONS))}, got {version}: {path}")
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            name = self._string()
            self.metadata[name] = self._value(self._scalar("<I"))
        self._infos = dict(self._info() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        """The tensors' names in the file."""
        return list(self._infos)

    def tensor(self, name: str) -> Floats:
        """The values of a tensor. Raises GgufError for an encoding that this module does not read."""
        shape, number, offset = self._infos[name]
        encoding = _ENCODINGS.get(number)
        if encoding is None:
            raise GgufError(f"expected a tensor in F32, F16, Q4_1 or Q8_0, got ggml's type {number} in {name}")
        blocks = int(np.prod(shape)) // encoding.values
        start = self._data + offset
        data = np.array(self._bytes[start : start + blocks * encoding.size]).reshape(blocks, encoding.size)
        return encoding.decode(data).reshape(shape)

    def _scalar(self, form: str) -> Any:
        size = struct.calcsize(form)
        (value,) = struct.unpack(form, bytes(self._bytes[self._at : self._at + size]))
        self._at += size
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._at += length
        return bytes(self._bytes[self._at - length : self._at]).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._scalar("<I"), self._scalar("<Q")
            return [self._value(item) for _ in range(length)]
        return self._scalar(_SCALARS[kind])

    def _info(self) -> tuple[str, _Info]:
        name, dimensions = self._string(), self._scalar("<I")
        reversed_shape = [self._scalar("<Q") for _ in range(dimensions)]
        return name, _Info(tuple(reversed(reversed_shape)), self._scalar("<I"), self._scalar("<Q"))


_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_weights(file: Gguf) -> Iterator[tuple[str, Floats]]:
    """Name in transformers and values of each tensor of a Llama. Raises GgufError for a tensor that no Llama has."""
    heads = {"attn_q": file.metadata["llama.attention.head_count"]}
    heads["attn_k"] = file.metadata.get("llama.attention.head_count_kv", heads["attn_q"])
    for name in file.names:
        if name in _WHOLE:
            yield _WHOLE[name], file.tensor(name)
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        part = rest.removesuffix(".weight")
        if not name.startswith("blk.") or part not in _LAYER:
            raise GgufError(f"expected the tensors of a Llama, got {name}")
        values = file.tensor(name)
        if part in heads:
            values = rotated_by_halves(values, heads[part])
        yield f"model.layers.{block}.{_LAYER[part]}.weight", values


def rotated_by_halves(weight: Floats, heads: int) -> Floats:
    """The rows [heads * dim, hidden] of q_proj or k_proj in the order of transformers.

    Rotary embeddings turn pairs of rows of a head: neighbours in GGUF, in transformers row i and row i + dim / 2.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
