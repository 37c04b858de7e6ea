"""The number of CPU threads that a model computes with, in the learner and in the embedded engine."""

import os
from pathlib import Path

LARGE_MODEL = 2_000_000
"""Parameters from which a second thread pays: on two cores it made an update 0.92 to 0.99 times as fast at 0.23 million
parameters, 1.08 to 1.25 times at 0.92 million and 1.21 to 1.48 times from 5 million on."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = _QUOTA) -> int:
    """The cores that this process may use: those it is bound to, or fewer by a container's CPU limit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, int(quota) // int(period)))


def choose_threads(parameters: int, cores: int, taken: int = 0) -> int:
    """One thread for a small model, else all cores but those `taken` by another that computes at the same time."""
    return max(1, cores - taken) if parameters >= LARGE_MODEL else 1
