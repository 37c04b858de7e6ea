"""When a call is tried again, and when it is given up.

A service that fails is asked a few times. While none can be reached, as when Ray Serve's proxy is restarted, tries do
not count for as long as the policy says. One that answers "later" (429, or any error with a `Retry-After`) lives and
says so, so asking it again is not limited by number but by the call's deadline: each pause is at least as long as the
service asked for, and the call ends with that answer when the next try would come after the deadline.
"""

import random

from tenacity import RetryCallState, wait_random_exponential

from trackway.clients.failures import is_backpressure, retry_after_of, unreached


class RetryState:
    """What one call has left: tries for failures, and time. `wait` and `stop` are tenacity's, asked in this order."""

    def __init__(
        self, attempts: int, backoff_s: float, max_backoff_s: float, deadline_s: float, outage_s: float = 0.0
    ) -> None:
        self._failures_left = attempts
        self._least_s = backoff_s
        self._backoff = wait_random_exponential(backoff_s, max_backoff_s)
        self._time_left_s = deadline_s
        self._outage_s = outage_s
        self._unreached_since: float | None = None

    def wait(self, state: RetryCallState) -> float:
        """Up to half as long again as the service asked for, so that those it refused together come one by one."""
        asked_s = retry_after_of(_error(state))
        if asked_s is None:
            return self._backoff(state)
        return max(asked_s, self._least_s) * random.uniform(1.0, 1.5)

    def stop(self, state: RetryCallState) -> bool:
        """Out of tries, or the time left is shorter than the pause asked for."""
        if is_backpressure(_error(state)):
            elapsed_s = state.seconds_since_start or 0.0
            return elapsed_s + state.upcoming_sleep >= self._time_left_s
        if self._is_outage(state):
            return False
        self._failures_left -= 1
        return self._failures_left <= 0

    def _is_outage(self, state: RetryCallState) -> bool:
        """Whether the service cannot be reached, and has not been for at most `outage_s`."""
        if not unreached(_error(state)):
            self._unreached_since = None
            return False
        now_s = state.seconds_since_start or 0.0
        if self._unreached_since is None:
            self._unreached_since = now_s
        return now_s - self._unreached_since < self._outage_s


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
