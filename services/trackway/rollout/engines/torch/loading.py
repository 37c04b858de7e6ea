"""New weights become servable: read, put on the device, and scored on the canary before anyone meets them."""

import math
from pathlib import Path

import torch

from trackway.rollout.engines.torch.checkpoint import read_weights
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Canary

# Rounding of bfloat16 alone moves a logprob by up to 0.055; a stale lm_head moves it by 0.3 on average.
_NOISE = {torch.float32: 0.0, torch.bfloat16: 0.15}


def load(decoder: Decoder, folder: Path, canary: Canary | None) -> DecoderWeights:
    """The folder's weights; raises WEIGHTS_CORRUPT when they are not the model's or miss the canary."""
    with torch.inference_mode():
        weights = read_weights(folder, decoder.config, decoder.device, decoder.dtype)
        if canary is not None:
            tolerance = max(canary.tolerance, _NOISE[decoder.dtype])
            check_canary(decoder.score(weights, canary.token_ids), canary, tolerance, folder)
        return weights


def check_canary(scored: list[float], canary: Canary, tolerance: float, folder: Path) -> None:
    """Raises WEIGHTS_CORRUPT unless all logprobs are numbers within the tolerance of the publisher's."""
    same_length = len(scored) == len(canary.logprobs)
    differences = [abs(ours - theirs) for ours, theirs in zip(scored, canary.logprobs, strict=False)]
    if same_length and all(difference <= tolerance for difference in differences):  # False for NaN
        return
    worst = max(differences, key=lambda d: math.inf if math.isnan(d) else d, default=0.0)
    raise TrackwayError(
        ErrorCode.WEIGHTS_CORRUPT,
        f"expected {len(scored)} canary logprobs within {tolerance} of the publisher's, got {len(canary.logprobs)} "
        f"with a difference of {worst:.3g} for the weights in {folder}; publish the weights that the trainer scored, "
        "in full, lm_head.weight included",
        difference=str(worst),
    )


def device_of(settings: RolloutSettings) -> torch.device:
    """The device that settings name; `auto` is CUDA where there is one."""
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(settings: RolloutSettings, device: torch.device) -> torch.dtype:
    """The type that settings name; `auto` is bfloat16 on CUDA, else float32, which a CPU without AMX does faster."""
    name = settings.dtype if settings.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32
