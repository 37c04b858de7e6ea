"""Weights of the embedded engine: loaded and verified by digests before any request uses them, kept while it sleeps.

Published weights are safetensors files. Every name and shape is checked before a tensor is used.

While the engine sleeps, a GPU's weights are in pinned main memory, a CPU's in a file. Main memory is what a sleeping
CPU engine gives away, so its copy goes to an unnamed file in the temporary folder. A copy does not depend on the folder
that the weights were read from, which may have been pruned from the store.
"""

import contextlib
import gc
import hashlib
import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights, LayerWeights, cache_shape
from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.rollout.engines.weight_folder import merge_adapter, not_finite
from trackway.rollout.engines.weight_folder import tensors as tensors_of
from trackway.rollout.engines.weight_proof import HeldDigests, Judgement, compare_digests, judge
from trackway.rollout.settings import DEFAULT_MAX_LEN, RolloutSettings
from trackway.system import writing
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import TensorDigest, WeightProof

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
    layers = (_layer_weights(tensors, f"model.layers.{index}.", config) for index in range(config.num_layers))
    return DecoderWeights(
        embed=tensors[EMBED],
        layers=tuple(layers),
        norm=tensors["model.norm.weight"],
        lm_head=tensors.get(LM_HEAD, tensors[EMBED]),
    )


def _layer_weights(tensors: dict[str, Tensor], prefix: str, config: DecoderConfig) -> LayerWeights:
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


_THREADS = min(8, os.cpu_count() or 1)


def published_digests(digests: Sequence[TensorDigest], dtype: torch.dtype) -> dict[str, str]:
    """The expected digests in an engine of this type, by name, where published."""
    published = {tensor.name: tensor.sha256.get(_digested(tensor, dtype)) for tensor in digests}
    return {name: sha256 for name, sha256 in published.items() if sha256 is not None}


def held_digests(weights: DecoderWeights, config: DecoderConfig, digests: Sequence[TensorDigest]) -> dict[str, str]:
    """The sha256 of the published tensors as the engine holds them. Unknown ones are absent."""
    types = {tensor.name: _digested(tensor, weights.embed.dtype) for tensor in digests}
    held = {name: tensor for name, tensor in unfused(weights, config) if name in types}
    with ThreadPoolExecutor(_THREADS) as pool:
        hashed = pool.map(lambda name: _sha256(held[name], getattr(torch, types[name])), held)
        return dict(zip(held, hashed, strict=True))


def unfused(weights: DecoderWeights, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """The engine's parameters by their names in a Hugging Face checkpoint."""
    yield EMBED, weights.embed
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer(layer, config):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", weights.norm
    yield LM_HEAD, weights.lm_head


def _layer(layer: LayerWeights, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", layer.input_norm
    if config.fused:
        yield from ((QKV, layer.qkv), (GATE_UP, layer.gate_up))
    for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None and not config.fused:
            for name, part in zip(("q", "k", "v"), fused.split((q, kv, kv)), strict=True):
                yield f"self_attn.{name}_proj.{kind}", part
    if layer.qk_norm is not None:
        for name, part in zip(("q", "k"), layer.qk_norm.split((config.num_heads, config.num_kv_heads)), strict=True):
            # One row repeated per head; if heads differ, no published digest matches.
            yield f"self_attn.{name}_norm.weight", part[0] if bool((part == part[0]).all()) else part
    yield "self_attn.o_proj.weight", layer.o
    if layer.o_bias is not None:
        yield "self_attn.o_proj.bias", layer.o_bias
    yield "post_attention_layernorm.weight", layer.mlp_norm
    for name, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True) if not config.fused else ():
        yield f"mlp.{name}_proj.weight", part
    yield "mlp.down_proj.weight", layer.down


def _digested(tensor: TensorDigest, dtype: torch.dtype) -> str:
    """The type for comparison: the engine's, else the published one, which the engine only widened."""
    name = str(dtype).removeprefix("torch.")
    return name if name in tensor.sha256 else tensor.dtype


def _sha256(tensor: Tensor, dtype: torch.dtype) -> str:
    narrowed = tensor.to(dtype)
    if narrowed.dtype != tensor.dtype and not torch.equal(narrowed.to(tensor.dtype), tensor):
        return "not of the published type"
    return hashlib.sha256(narrowed.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def load(decoder: Decoder, folder: Path) -> DecoderWeights:
    """The folder's weights. Raises WEIGHTS_CORRUPT if they do not fit the model."""
    with torch.inference_mode():
        return read_weights(folder, decoder.config, decoder.device, decoder.dtype)


def load_merged(decoder: Decoder, base: Path, adapter: Path) -> DecoderWeights:
    """The base's weights with the adapter's. Raises WEIGHTS_CORRUPT if they do not fit the model."""
    with torch.inference_mode():
        return read_weights(base, decoder.config, decoder.device, decoder.dtype, adapter)


def prove(decoder: Decoder, weights: DecoderWeights, before: DecoderWeights, proof: WeightProof) -> Judgement:
    """The verdict on these weights. `before` are the ones they replace."""
    with torch.inference_mode():
        digests = _compare(decoder, weights, before, proof)
        scored = [decoder.score(weights, probe.token_ids[: decoder.max_len]) for probe in proof.probes]
    return judge(proof, str(decoder.dtype).removeprefix("torch."), scored, digests)


def device_of(settings: RolloutSettings) -> torch.device:
    """The device in the settings. `auto` is CUDA if available."""
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(settings: RolloutSettings, device: torch.device) -> torch.dtype:
    """The type in the settings. `auto` is bfloat16 on CUDA, else float32, the faster one on a CPU without AMX."""
    name = settings.dtype if settings.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def needed_memory(settings: RolloutSettings) -> int:
    """Bytes that an engine's weights and KV cache take at its start. The cache grows with the longest sequence."""
    device = device_of(settings)
    config, longest = DecoderConfig.read(settings.model_path), settings.max_model_len or DEFAULT_MAX_LEN
    values = sum(math.prod(tensor.shape) for tensor in tensors_of(settings.model_path).values())
    values += math.prod(cache_shape(config, settings.max_num_seqs, min(longest, config.max_positions)))
    return values * dtype_of(settings, device).itemsize


def free_memory(settings: RolloutSettings) -> tuple[str, int]:
    """The kind of memory that engines of these settings use, and its free bytes."""
    device = device_of(settings)
    if device.type == "cpu":
        return "memory", psutil.virtual_memory().available
    torch.cuda.empty_cache()  # what unloaded policies left in PyTorch's cache is free
    return "GPU memory", torch.cuda.mem_get_info(device)[0]


def _compare(decoder: Decoder, weights: DecoderWeights, before: DecoderWeights, proof: WeightProof) -> HeldDigests:
    published = published_digests(proof.digests, decoder.dtype)
    held = compare_digests(held_digests(weights, decoder.config, proof.digests), published)
    if held.other:  # the old weights' logprobs are needed only then
        old = held_digests(before, decoder.config, proof.digests)
        held = compare_digests(held_digests(weights, decoder.config, proof.digests), published, old)
    return held


_SUMMED = 1 << 22
"""Values that are summed at a time: the sum widens each to 8 bytes."""


class SleepingWeights:
    """A copy of weights. `shapes` stands in for them and holds no memory."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Copies the weights. Raises StorageError when the disk is full or not writable."""
        self._device = weights.embed.device
        tensors = weights.tensors()
        with torch.inference_mode():
            self.shapes = weights.mapped(lambda tensor: tensor.to("meta"))
            self._sums = bit_sums(tensors)
            on_gpu = self._device.type != "cpu"
            self._pinned = [_pinned(tensor) for tensor in tensors] if on_gpu else []
            self._file = None if on_gpu else _written(tensors)
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    def restored(self) -> DecoderWeights:
        """The weights on their device. Raises ENGINE_FAILED unless their bits are those that went to sleep."""
        with torch.inference_mode():
            tensors = self._copied_back()
            if bit_sums(tensors) != self._sums:
                message = "expected the weights that went to sleep, got other bits; restart this replica"
                raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
        restored = iter(tensors)
        return self.shapes.mapped(lambda _: next(restored))

    def _copied_back(self) -> list[Tensor]:
        if self._file is None:
            return [copy.to(self._device, non_blocking=True) for copy in self._pinned]
        return _read(self._file, self.shapes.tensors())


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sums of the tensors' bit patterns as integers, several of a large tensor."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    parts = [part for tensor in tensors for part in tensor.flatten().view(kinds[tensor.itemsize]).split(_SUMMED)]
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).tolist()  # one synchronization with the device


def release_cached_memory(device: torch.device) -> None:
    """Gives the GPU what PyTorch's cache holds of freed tensors, out of reach of other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _written(tensors: Sequence[Tensor]) -> IO[bytes]:
    with writing(Path(tempfile.gettempdir()), "the weights of a sleeping engine"):
        file = tempfile.TemporaryFile(prefix="trackway-asleep-")  # noqa: SIM115  open as long as the sleep
        try:
            for tensor in tensors:
                file.write(_bytes(tensor))
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            raise
    return file


def _read(file: IO[bytes], shapes: Sequence[Tensor]) -> list[Tensor]:
    file.seek(0)
    tensors = [torch.empty(shape.shape, dtype=shape.dtype) for shape in shapes]
    for tensor in tensors:
        file.readinto(_bytes(tensor))  # pyright: ignore[reportAttributeAccessIssue]
    return tensors


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data
