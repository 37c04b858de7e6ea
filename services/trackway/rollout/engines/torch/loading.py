"""Loads new weights: read, moved to the device, and verified by digests before any request uses them."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from trackway.rollout.engines.torch.checkpoint import EMBED, GATE_UP, LM_HEAD, QKV, read_weights
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights, LayerWeights
from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.rollout.engines.weight_proof import HeldDigests, Judgement, compare_digests, judge
from trackway.rollout.settings import RolloutSettings
from trackway.wire.weights import TensorDigest, WeightProof

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


def _compare(decoder: Decoder, weights: DecoderWeights, before: DecoderWeights, proof: WeightProof) -> HeldDigests:
    published = published_digests(proof.digests, decoder.dtype)
    held = compare_digests(held_digests(weights, decoder.config, proof.digests), published)
    if held.other:  # the old weights' logprobs are needed only then
        old = held_digests(before, decoder.config, proof.digests)
        held = compare_digests(held_digests(weights, decoder.config, proof.digests), published, old)
    return held
