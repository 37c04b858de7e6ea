"""Metrics of a step: seconds by activity, idle time of each side of the run, and spreads of values."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

Metrics = dict[str, float]
Now = Callable[[], float]
"""A clock that never goes back, in seconds."""


def spread(name: str, values: Sequence[float]) -> Metrics:
    """`name/mean`, `/max` and `/min`. Empty without values."""
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


class Clock:
    """Measures seconds per activity, as `timing_s/<activity>`."""

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Time a block. Times of the same activity add up until `take`."""
        started = self._now()
        try:
            yield
        finally:
            self._seconds[activity] += self._now() - started

    def split(self, activity: str, parts: Mapping[str, float]) -> None:
        """Count seconds of an activity as its parts' seconds, which are activities of their own."""
        for part, seconds in parts.items():
            self._seconds[activity] -= seconds
            self._seconds[part] += seconds

    def take_seconds(self) -> dict[str, float]:
        """The seconds by activity since the last `take`."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def take(self) -> Metrics:
        """The same as metrics."""
        return {f"timing_s/{activity}": seconds for activity, seconds in self.take_seconds().items()}


class ActiveTime:
    """Measures the seconds in which at least one block runs. Blocks may overlap."""

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._running = 0
        self._counted_to = self._taken = now()
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A block of activity."""
        self._count()
        self._running += 1
        try:
            yield
        finally:
            self._count()
            self._running -= 1

    def take(self) -> Metrics:
        """Active and elapsed seconds since the last `take`, and the idle share, under the names of verl's rollouter."""
        self._count()
        active, elapsed = self._seconds, self._counted_to - self._taken
        self._seconds, self._taken = 0.0, self._counted_to
        return {
            "fully_async/rollouter/active_time": active,
            "fully_async/rollouter/version_time": elapsed,
            "fully_async/rollouter/idle_ratio": 1 - active / elapsed if elapsed else 0.0,
        }

    def _count(self) -> None:
        now = self._now()
        if self._running:
            self._seconds += now - self._counted_to
        self._counted_to = now
