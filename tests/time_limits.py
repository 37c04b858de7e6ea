"""Limits in time that tests share."""

import time
from functools import cache

import pytest

ENDS_SOON = pytest.mark.timeout(30, func_only=True)
"""For a test of a deadline, which would otherwise pass when the deadline comes a minute late."""

_FAST_S = 0.007
"""CPU seconds of `_work` on a fast machine; slow or busy ones took 0.035 and 0.065."""


@cache
def slowness() -> float:
    """How many times slower than a fast machine this one is, at least 1; bounds of CPU time are multiplied by it."""
    return max(1.0, min(_work() for _ in range(3)) / _FAST_S)


def _work() -> float:
    begun = time.process_time()
    sum(number * number for number in range(200_000))
    return time.process_time() - begun
