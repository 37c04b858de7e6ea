"""The time at which a caller stops waiting.

Other processes get the seconds that are left, since clocks of machines differ. The monotonic clock stands still while a
machine is suspended.
"""

import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Deadline:
    """The time at which a caller stops waiting, by this process's `time.monotonic`."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The moment `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Return whether the moment has passed."""
        return self.remaining == 0.0

    def earlier(self, seconds: float) -> "Deadline":
        """This deadline, or `seconds` from now if that is earlier."""
        return Deadline(min(self.at, time.monotonic() + seconds))
