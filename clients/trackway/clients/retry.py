"""Stop and wait rules for retries of a call.

Failures are retried a fixed number of times. Attempts that reach no service, for example while Ray Serve's proxy
restarts, do not count for up to `outage_s` seconds. Backpressure (429, or any error with `Retry-After`) is limited by
the call's deadline instead of a number of attempts: each pause is at least as long as the service asked for, and the
call fails with that answer if the next attempt would come after the deadline, or so shortly before it that it would be
cut off.
"""

import random

from tenacity import RetryCallState, wait_random_exponential

from trackway.clients.failures import is_backpressure, retry_after_of, unreached

_LAST_ATTEMPT_S = 1.0
"""Time that an attempt after a refusal must have. A fifth of the call's time if that is less."""


class RetryState:
    """The attempts and the time that one call has left. Tenacity calls `wait` before `stop`."""

    def __init__(
        self, attempts: int, backoff_s: float, max_backoff_s: float, deadline_s: float, outage_s: float = 0.0
    ) -> None:
        self._failures_left = attempts
        self._least_s = backoff_s
        self._backoff = wait_random_exponential(backoff_s, max_backoff_s)
        self._time_left_s = deadline_s - min(_LAST_ATTEMPT_S, deadline_s / 5)
        self._outage_s = outage_s
        self._unreached_since: float | None = None

    def wait(self, state: RetryCallState) -> float:
        """Seconds until the next attempt: 1 to 1.5 times the requested pause, so that refused clients spread out."""
        asked_s = retry_after_of(_error(state))
        if asked_s is None:
            return self._backoff(state)
        return max(asked_s, self._least_s) * random.uniform(1.0, 1.5)

    def stop(self, state: RetryCallState) -> bool:
        """Return whether no attempts are left, or the requested pause leaves no time for another one."""
        if is_backpressure(_error(state)):
            elapsed_s = state.seconds_since_start or 0.0
            return elapsed_s + state.upcoming_sleep >= self._time_left_s
        if self._is_outage(state):
            return False
        self._failures_left -= 1
        return self._failures_left <= 0

    def _is_outage(self, state: RetryCallState) -> bool:
        """Return whether the service has been unreachable, for less than `outage_s` seconds so far."""
        if not unreached(_error(state)):
            self._unreached_since = None
            return False
        now_s = state.seconds_since_start or 0.0
        if self._unreached_since is None:
            self._unreached_since = now_s
        return now_s - self._unreached_since < self._outage_s


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
