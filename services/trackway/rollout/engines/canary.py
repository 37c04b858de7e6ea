"""The weight-sync canary: what an engine scores must be what the publisher scored."""

import math
from collections.abc import Sequence
from pathlib import Path

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Canary

# Rounding of bfloat16 alone moves a logprob by up to 0.055; a stale lm_head moves it by 0.3 on average.
NOISE = {"float32": 0.0, "bfloat16": 0.15}


def check_canary(scored: Sequence[float], canary: Canary, dtype: str, folder: Path) -> None:
    """Raises WEIGHTS_CORRUPT unless all logprobs are numbers within the tolerance of the publisher's."""
    tolerance = max(canary.tolerance, NOISE[dtype])
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
