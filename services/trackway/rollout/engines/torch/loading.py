"""New weights become servable: read, put on the device, and scored on the canary before anyone meets them."""

from pathlib import Path

import torch

from trackway.rollout.engines.canary import check_canary
from trackway.rollout.engines.torch.checkpoint import read_weights
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.settings import RolloutSettings
from trackway.wire.weights import Canary


def load(decoder: Decoder, folder: Path, canary: Canary | None) -> DecoderWeights:
    """The folder's weights; raises WEIGHTS_CORRUPT when they are not the model's or miss the canary."""
    with torch.inference_mode():
        weights = read_weights(folder, decoder.config, decoder.device, decoder.dtype)
        if canary is not None:
            check_canary(decoder.score(weights, canary.token_ids), canary, str(decoder.dtype).split(".")[1], folder)
        return weights


def device_of(settings: RolloutSettings) -> torch.device:
    """The device that settings name; `auto` is CUDA where there is one."""
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(settings: RolloutSettings, device: torch.device) -> torch.dtype:
    """The type that settings name; `auto` is bfloat16 on CUDA, else float32, which a CPU without AMX does faster."""
    name = settings.dtype if settings.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32
