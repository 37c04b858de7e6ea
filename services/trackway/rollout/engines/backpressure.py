"""Retry-After estimates for requests that a full engine rejects."""

_LEARNING = 0.1
_LONGEST_S = 60.0


class RetryAfterEstimator:
    """Spreads the retry times of rejected requests at the rate at which slots come free.

    Retries then arrive as they can be served, not all at once. Half of the queue is kept in reserve.
    """

    def __init__(self, slots: int, stay_s: float) -> None:
        self._slots = slots
        self._stay_s = stay_s
        self._promised_at = 0.0

    def left(self, stay_s: float, in_flight: int = 0) -> None:
        """Record that a request ended after so long in a slot, or in slot and queue if their count is given."""
        in_slot_s = stay_s * self._slots / max(self._slots, in_flight)  # Little's law (Little 1961)
        self._stay_s += _LEARNING * (in_slot_s - self._stay_s)

    def turn_away(self, waiting: int, now: float) -> float:
        """Seconds until a further request may find a slot, with `waiting` in the queue."""
        pace_s = self._stay_s / self._slots
        soonest = now + pace_s * max(1.0, waiting / 2)
        self._promised_at = max(soonest, min(self._promised_at + pace_s, now + _LONGEST_S))
        return self._promised_at - now
