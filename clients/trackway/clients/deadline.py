"""The time at which a caller stops waiting."""

import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Deadline:
    """The time at which a caller stops waiting; Unix time in seconds, so that it can be sent to other processes."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The moment `seconds` from now."""
        return cls(time.time() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.time())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.remaining == 0.0

    def earlier(self, seconds: float) -> "Deadline":
        """This deadline, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.time() + seconds))
