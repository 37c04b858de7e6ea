"""The most likely tokens at one position."""

import math
from collections.abc import Iterable

from trackway.wire.rollout import TopLogprobs


def top_logprobs(candidates: Iterable[tuple[int, float]], token: int, logprob: float, count: int) -> TopLogprobs:
    """The sampled token and the `count - 1` most likely others, highest first, as vLLM selects them.

    Without a candidate of probability 0, so there may be fewer.
    """
    others = [(other, value) for other, value in candidates if other != token and value > -math.inf]
    others = sorted(others, key=_by_value)[: count - 1]
    return sorted([*others, (token, logprob)], key=_by_value)


def _by_value(pair: tuple[int, float]) -> float:
    return -pair[1]
