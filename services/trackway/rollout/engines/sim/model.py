"""The simulated engine's arithmetic: pure functions of time, so that a whole load can be computed without waiting.

Requests of one batch advance together, one token a step, and a step takes longer the fuller the batch is. So the core
keeps one clock in steps for all of them: a request that is admitted at step s with n tokens to make is over at s + n,
whatever joins or leaves meanwhile; only the seconds that a step takes change. Each event costs O(log requests).
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trackway.rollout.engines.backpressure import RetryAfterEstimator
from trackway.rollout.engines.protocol import EngineStats, FinishReason, Generation
from trackway.rollout.sim_settings import SimSettings
from trackway.wire.trajectory import WeightSpan

BLOCK = 16
"""Tokens that the prefix cache takes or leaves as a whole, as vLLM's."""
_ROUNDING = 1e-6


@dataclass(eq=False)
class Request:
    """One prompt, and the answer that it will get if nothing cuts it."""

    request_id: str
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    ending: FinishReason
    streamed: bool = False
    first_step: float = -1.0
    """Step of the clock after which its first token is there; negative while it waits."""
    admitted_at: float = 0.0
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(tokens made, version) at each change of weights, the first at its admission."""
    result: Generation | None = None

    def spans(self, made: int) -> list[WeightSpan]:
        """Which weights made the first `made` tokens."""
        ends = [*(start for start, _ in self.cuts[1:]), made]
        return [
            WeightSpan(version=version, start=start, end=end)
            for (start, version), end in zip(self.cuts, ends, strict=False)
            if start < end
        ]

    def finish(self, made: int, reason: FinishReason) -> None:
        """Fix the result."""
        self.result = Generation(self.answer[:made], self.logprobs[:made], reason, self.spans(made))


class SimCore:
    """Who runs and waits, and when something happens next. Every method is told the time; none waits."""

    def __init__(self, settings: SimSettings, slots: int, caching: bool) -> None:
        self.version = 0
        self.frozen = False
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()
        self._settings, self._slots = settings, slots
        self._cache = PrefixCache(settings.cache_tokens // BLOCK if caching else 0)
        self._steps, self._now = 0.0, 0.0
        self._events: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._places = RetryAfterEstimator(slots, settings.response_tokens * self._step_s(slots))
        self._generated = self._prefilled = self._reused = 0

    def add(self, request: Request) -> None:
        """Take a request; it runs at once when a slot is free."""
        self.waiting.append(request)
        self._admit()

    def advance(self, now: float) -> list[Request]:
        """Let time pass; returns the requests that ended, and streamed ones that have more to tell."""
        told: list[Request] = []
        while (at := self.next_at()) is not None and at <= now:
            self._pass(at)
            self._steps = max(self._steps, self._events[0][0])
            told += self._happen()
        self._pass(now)
        return told

    def next_at(self) -> float | None:
        """The time of the next event; None when nothing runs or all is frozen."""
        while self._events and self._events[0][2].result is not None:
            heapq.heappop(self._events)
        if self.frozen or not self._events:
            return None
        return self._now + max(0.0, self._events[0][0] - self._steps) * self._step_s(len(self.running))

    def made(self, request: Request) -> int:
        """Tokens that a request has by now."""
        if request.result is not None:
            return len(request.result.token_ids)
        if request.first_step < 0:
            return 0
        return max(0, min(len(request.answer), int(self._steps - request.first_step + 1 + _ROUNDING)))

    def end(self, requests: Sequence[Request]) -> None:
        """Cut requests, which keep what they have."""
        for request in requests:
            if request.first_step < 0:
                self.waiting.remove(request)
            self._leave(request, "abort")
        self._admit()

    def swap(self, version: int) -> None:
        """Go on with other weights: running requests keep what they have, no new one may reuse it."""
        self.version = version
        self._cache.forget()
        for request in self.running:
            request.cuts.append((self.made(request), version))

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._cache.forget()

    def turn_away(self) -> float:
        """Seconds after which one for whom there is no room should come again."""
        return self._places.turn_away(len(self.waiting), self._now)

    def stats(self) -> EngineStats:
        """Counts since the start and of now."""
        partial = sum(map(self.made, self.running))
        running, waiting, steps = len(self.running), len(self.waiting), int(self._steps)
        return EngineStats(running, waiting, steps, self._generated + partial, self._prefilled, self._reused)

    def _pass(self, now: float) -> None:
        if self.running and not self.frozen:
            self._steps += max(0.0, now - self._now) / self._step_s(len(self.running))
        self._now = max(now, self._now)

    def _happen(self) -> list[Request]:
        told = []
        while self._events and self._events[0][0] <= self._steps + _ROUNDING:
            request = heapq.heappop(self._events)[2]
            if request.result is not None:
                continue
            if self.made(request) == len(request.answer):
                self._leave(request, request.ending)
            else:
                self._expect(request)
            told.append(request)
        self._admit()
        return told

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._slots:
            request = self.waiting.popleft()
            reused = self._cache.reuse(request.prompt)
            self._reused += reused
            self._prefilled += len(request.prompt) - reused
            prefill_s = (len(request.prompt) - reused) / self._settings.prefill_tokens_per_s
            request.first_step = self._steps + prefill_s / self._settings.step_s + 1
            request.admitted_at = self._now
            request.cuts.append((0, self.version))
            self.running.add(request)
            self._expect(request)

    def _expect(self, request: Request) -> None:
        tokens = self.made(request) + 1 if request.streamed else len(request.answer)
        heapq.heappush(self._events, (request.first_step + tokens - 1, next(self._order), request))

    def _leave(self, request: Request, reason: FinishReason) -> None:
        made = self.made(request)
        request.finish(made, reason)
        if request in self.running:
            self.running.remove(request)
            self._generated += made
            self._places.left(self._now - request.admitted_at)
            self._cache.reuse(request.prompt + request.answer[:made])

    def _step_s(self, batch: int) -> float:
        return self._settings.step_s + self._settings.step_slope_s * max(0, batch - 1)


class PrefixCache:
    """Which blocks of tokens have been computed; a block is known by itself and all before it."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._known: OrderedDict[int, None] = OrderedDict()

    def reuse(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest known beginning, one at least left to compute; all blocks are known afterwards."""
        known, chain, all_known = 0, 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            all_known = all_known and chain in self._known
            known += all_known
            self._known[chain] = None
            self._known.move_to_end(chain)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return min(known * BLOCK, len(tokens) - 1)

    def forget(self) -> None:
        """Know nothing."""
        self._known.clear()
