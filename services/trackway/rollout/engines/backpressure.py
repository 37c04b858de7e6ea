"""When a request that found the engine full should come again."""

_LEARNING = 0.1
_LONGEST_S = 60.0


class RetryAfterEstimator:
    """Gives those turned away times one after the other, at the pace at which slots come free.

    So they come back as they can be served, instead of all together; half of the queue stays as a reserve meanwhile.
    """

    def __init__(self, slots: int, stay_s: float) -> None:
        self._slots = slots
        self._stay_s = stay_s
        self._promised_at = 0.0

    def left(self, stay_s: float, in_flight: int = 0) -> None:
        """A request ended that had a slot for so long, or slot and queue when it is told how many were in both."""
        in_slot_s = stay_s * self._slots / max(self._slots, in_flight)  # Little 1961
        self._stay_s += _LEARNING * (in_slot_s - self._stay_s)

    def turn_away(self, waiting: int, now: float) -> float:
        """Seconds until one more may find a place, when `waiting` are in the queue."""
        pace_s = self._stay_s / self._slots
        soonest = now + pace_s * max(1.0, waiting / 2)
        self._promised_at = max(soonest, min(self._promised_at + pace_s, now + _LONGEST_S))
        return self._promised_at - now
