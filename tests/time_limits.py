"""Limits in time that tests share."""

import time
from functools import cache

import pytest

ENDS_SOON = pytest.mark.timeout(30, func_only=True)
"""For a test of a deadline, which would otherwise pass when the deadline comes a minute late."""

_USUAL_S = 0.03
"""CPU seconds of `_work` up to which bounds stand as they are; a slow 2.5 GHz Xeon took 0.065."""


@cache
def slowness() -> float:
    """How many times slower than usual this machine is, at least 1; bounds of CPU time are multiplied by it."""
    return max(1.0, min(_work() for _ in range(3)) / _USUAL_S)


def _work() -> float:
    begun = time.process_time()
    sum(number * number for number in range(200_000))
    return time.process_time() - begun
