"""Pauses between attempts that are repeated until they succeed. Calls with a limit of attempts use tenacity."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """The pause doubles with each failure in a row, from `first_s` up to `longest_s` seconds."""

    first_s: float
    longest_s: float
    spread: tuple[float, float] = (0.75, 1.25)
    """Each pause is multiplied by a random number in this range, so that clients do not retry together."""

    def pause_s(self, failures: int) -> float:
        """Seconds to pause after this number of failures in a row; none after no failure."""
        if failures <= 0:
            return 0.0
        doublings = min(failures - 1, 60)  # more would not fit a float in the end
        return min(self.longest_s, self.first_s * 2.0**doublings) * random.uniform(*self.spread)
