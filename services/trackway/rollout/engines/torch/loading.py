"""Loads new weights: read, moved to the device, and verified before any request uses them."""

from pathlib import Path

import torch

from trackway.rollout.engines.torch.checkpoint import read_weights
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.engines.torch.digests import held_digests, published_digests
from trackway.rollout.engines.weight_proof import HeldDigests, Judgement, compare_digests, judge
from trackway.rollout.settings import RolloutSettings
from trackway.wire.weights import WeightProof


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
