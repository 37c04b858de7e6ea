"""The number of rollouts in flight that the engines' KV caches hold.

A rollout's context stays cached from its start to its end, also while it waits for tools, and grows all the time. With
too many in flight they evict each other's prefixes, and by then it is too late: those in flight have to end. So the
limit follows a forecast. Kaplan and Meier's method estimates the lengths at which rollouts end, where those in flight
count as not ended yet. For each further growth the forecast sums the tokens of the rollouts that will not have ended.
As many more may start as keep the largest sum within the KV caches. The engines' metrics say how many tokens those
hold, and how much of them a token of context takes, since rollouts share prompts. Preemptions lower the limit.

`benchmarks/in_flight.py` runs this module with simulated replicas. It chose the constants.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trackway.wire.rollout import EngineLoad

FILLED = 0.85
"""Share of the KV tokens that the forecast may fill."""
IDLE = 0.25
"""Share of the KV tokens, below which prefixes of rollouts that wait for tools are worth less than more rollouts."""
LEAST_BUDGET, MOST_BUDGET = 0.5, 1.5
LOWERED, RAISED = 0.9, 1.01
"""Factors of the budget for an update with preemptions, and for one without."""
SMOOTHING = 0.1
"""Weight of a new measurement."""
BINS = 64
"""Steps of the forecast."""
UNENDED = 4
"""Rollouts that are taken to reach the longest context, so that few ended ones prove little."""
MAX_ENDED = 512
"""Most ended rollouts whose lengths are remembered."""


@dataclass
class _Context:
    """A rollout's context."""

    tokens: int
    since: float | None = None
    """When its generation began, while one is in progress."""


class RolloutLimiter:
    """Limits the rollouts of one caller between two bounds. Pure: no I/O, no clock, no randomness.

    `now` is in seconds from any origin.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._contexts: dict[str, _Context] = {}
        self._ended: deque[int] = deque(maxlen=MAX_ENDED)
        self._prompts: deque[int] = deque(maxlen=MAX_ENDED)
        self._speed = 0.0
        self._share = self._budget = 1.0
        self._preemptions: int | None = None
        self.limit = least
        """Most rollouts in flight."""
        self.reason = "no engine has reported its KV cache yet"
        """Why it is not higher."""

    def begin_turn(self, rollout: str, tokens: int, now: float) -> None:
        """Count a generation that begins with a context of so many tokens."""
        if rollout not in self._contexts:
            self._prompts.append(tokens)
        self._contexts[rollout] = _Context(tokens, now)

    def end_turn(self, rollout: str, generated: int, now: float) -> None:
        """Count the tokens of a generation that has ended. An unknown rollout is ignored."""
        context = self._contexts.get(rollout)
        if context is None or context.since is None:
            return
        if generated and now > context.since:
            speed = generated / (now - context.since)
            self._speed += (speed - self._speed) * (SMOOTHING if self._speed else 1.0)
        self._contexts[rollout] = _Context(context.tokens + generated)

    def release(self, rollout: str) -> None:
        """Count a rollout no longer: it has ended. An unknown one is ignored."""
        context = self._contexts.pop(rollout, None)
        if context is not None:
            self._ended.append(context.tokens)

    def update(self, loads: Sequence[EngineLoad], in_flight: int, now: float) -> int:
        """Set and return the limit.

        Args:
            loads: of all replicas. Without any that knows its KV cache the limit stays.
            in_flight: rollouts that have started, those before their first turn included.
            now: time of the loads.
        """
        loads = [load for load in loads if load.kv_tokens]
        if not loads:
            self.reason = "no engine reports its KV cache"
            return self.limit
        callers = max(load.callers for load in loads)
        capacity = sum(load.kv_tokens for load in loads) / callers
        lengths = [self._length(context, now) for context in self._contexts.values()]
        self._measure(loads, capacity, sum(lengths), now)
        max_len = max(load.max_len for load in loads)
        starting = max(0, in_flight - len(lengths))
        room = self._room(capacity * FILLED * self._budget / self._share, lengths, starting, max_len)
        fitting = in_flight + math.floor(room)
        self.limit = max(self._least, min(self._most, fitting))
        bound = "the lower bound; " if fitting < self._least else "the upper bound; " if fitting > self._most else ""
        self.reason = (
            f"{bound}{FILLED * self._budget:.0%} of {capacity:,.0f} KV tokens, of which {in_flight} rollouts hold "
            f"{sum(lengths) * self._share:,.0f}; {sum(load.waiting for load in loads)} requests wait, "
            f"{self._preemptions} were preempted"
        )
        return self.limit

    def _length(self, context: _Context, now: float) -> float:
        return context.tokens + (0.0 if context.since is None else self._speed * (now - context.since))

    def _measure(self, loads: Sequence[EngineLoad], capacity: float, tokens: float, now: float) -> None:
        """Take the engines' metrics: KV tokens a token of context, and the share of the cache to fill."""
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        used = sum(load.kv_used for load in loads) / max(load.callers for load in loads)
        generating = sum(self._length(context, now) for context in self._contexts.values() if context.since is not None)
        if running and generating:
            share = used / (generating * running / (running + waiting))
            self._share += (min(4.0, max(0.05, share)) - self._share) * SMOOTHING
        preemptions = sum(load.preemptions for load in loads)
        preempted = self._preemptions is not None and preemptions > self._preemptions
        self._preemptions = preemptions
        # Most prefixes wait for tools, and to compute one again costs little then.
        idle = not waiting and used < IDLE * capacity and tokens * self._share > 0.7 * capacity
        if preempted:
            self._budget = max(LEAST_BUDGET, self._budget * LOWERED)
        elif self._budget < 1 or idle:
            self._budget = min(MOST_BUDGET, self._budget * RAISED)
        else:
            self._budget = max(1.0, self._budget / RAISED)

    def _room(self, budget: float, lengths: list[float], starting: int, max_len: int) -> float:
        """Return how many more rollouts may start. Negative if too many are in flight.

        budget: tokens that the forecast may fill. lengths: of the rollouts in flight, in tokens. starting: rollouts
        before their first turn.
        """
        prompt = sum(self._prompts) / len(self._prompts) if self._prompts else 0.0
        width = (max([prompt, *lengths, *self._ended]) + 1) / BINS
        first = int(prompt / width)
        living, ended = [0] * BINS, [0] * BINS
        living[first] = starting + 1  # the next one
        for length in lengths:
            living[int(length / width)] += 1
        for length in self._ended:
            ended[int(length / width)] += 1
        survival = _survival(living, ended)

        def expected(start: int, growth: int) -> float:
            """Expected tokens of a rollout that has `start` bins now and grows by `growth` bins. An ended one has 0."""
            end = start + growth
            length = (end + 0.5) * width if end < BINS else max_len
            return survival[min(end, BINS)] / survival[start] * length

        present = [(start, count) for start, count in enumerate(living) if count]
        rooms = [
            (budget - sum(count * expected(start, growth) for start, count in present)) / expected(first, growth)
            for growth in range(BINS - first + 1)
            if expected(first, growth)
        ]
        return min(rooms) + 1


def _survival(living: list[int], ended: list[int]) -> list[float]:
    """The share of rollouts that grow to each bin, and beyond the last: Kaplan and Meier (1958)."""
    at_risk, left, survival = sum(living) + sum(ended) + UNENDED, 1.0, list[float]()
    for alive, gone in zip(living, ended, strict=True):
        survival.append(left)
        left *= 1 - gone / at_risk if gone else 1.0
        at_risk -= alive + gone
    return [*survival, left]
