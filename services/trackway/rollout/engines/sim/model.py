"""The simulated engine's model: pure functions of time, so that a whole load can be computed without waiting.

The requests of a batch advance together, one token per step, and the duration of a step grows with the batch. The core
keeps one clock in steps: a request admitted at step s with n tokens to generate ends at s + n, whatever other requests
do; only the seconds per step change. Each event costs O(log requests).
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trackway.rollout.engines.backpressure import RetryAfterEstimator
from trackway.rollout.engines.protocol import EngineStats, FinishReason, Generation
from trackway.rollout.sim_settings import SimSettings
from trackway.wire.trajectory import WeightSpan, add_span

BLOCK = 16
"""Tokens per block of the prefix cache, as in vLLM."""
_ROUNDING = 1e-6


@dataclass(eq=False)
class Request:
    """A prompt with its predetermined answer."""

    request_id: str
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    ending: FinishReason
    streamed: bool = False
    first_step: float = -1.0
    """The step after which its first token exists; negative while it waits."""
    admitted_at: float = 0.0
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(tokens made, version) at each change of weights, the first at its admission."""
    result: Generation | None = None

    def spans(self, count: int) -> list[WeightSpan]:
        """The weight spans of the first `count` tokens."""
        ends = [*(start for start, _ in self.cuts[1:]), count]
        spans: list[WeightSpan] = []
        for (start, version), end in zip(self.cuts, ends, strict=False):
            oldest = self.cuts[0][1]
            if start < end:
                add_span(spans, version, start, end, oldest if oldest != version else None)
        return spans

    def finish(self, count: int, reason: FinishReason) -> None:
        """Set the result."""
        self.result = Generation(self.answer[:count], self.logprobs[:count], reason, self.spans(count))


class SimCore:
    """The running and waiting requests and the next events. Methods take the time as an argument; none waits."""

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
        self._retry_after = RetryAfterEstimator(slots, settings.response_tokens * self._step_s(slots))
        self._generated = self._prefilled = self._reused = 0

    def add(self, request: Request) -> None:
        """Add a request, which runs at once if a slot is free."""
        self.waiting.append(request)
        self._admit()

    def advance(self, now: float) -> list[Request]:
        """Advance the clock; returns the requests that ended, and the streamed ones with new tokens."""
        due: list[Request] = []
        while (at := self.next_at()) is not None and at <= now:
            self._advance_clock(at)
            self._steps = max(self._steps, self._events[0][0])
            due += self._process_events()
        self._advance_clock(now)
        return due

    def next_at(self) -> float | None:
        """The time of the next event; None when nothing runs or all is frozen."""
        while self._events and self._events[0][2].result is not None:
            heapq.heappop(self._events)
        if self.frozen or not self._events:
            return None
        return self._now + max(0.0, self._events[0][0] - self._steps) * self._step_s(len(self.running))

    def generated(self, request: Request) -> int:
        """Tokens generated for a request so far."""
        if request.result is not None:
            return len(request.result.token_ids)
        if request.first_step < 0:
            return 0
        return max(0, min(len(request.answer), int(self._steps - request.first_step + 1 + _ROUNDING)))

    def end(self, requests: Sequence[Request]) -> None:
        """Abort requests, which keep their tokens."""
        for request in requests:
            if request.first_step < 0:
                self.waiting.remove(request)
            self._leave(request, "abort")
        self._admit()

    def swap(self, version: int) -> None:
        """Change the weights: running requests keep their tokens; new requests reuse nothing computed before."""
        self.version = version
        self._cache.forget()
        for request in self.running:
            request.cuts.append((self.generated(request), version))

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._cache.forget()

    def turn_away(self) -> float:
        """Seconds after which a rejected request should retry."""
        return self._retry_after.turn_away(len(self.waiting), self._now)

    def stats(self) -> EngineStats:
        """Totals since the start, and current numbers."""
        partial = sum(map(self.generated, self.running))
        running, waiting, steps = len(self.running), len(self.waiting), int(self._steps)
        return EngineStats(running, waiting, steps, self._generated + partial, self._prefilled, self._reused)

    def _advance_clock(self, now: float) -> None:
        if self.running and not self.frozen:
            self._steps += max(0.0, now - self._now) / self._step_s(len(self.running))
        self._now = max(now, self._now)

    def _process_events(self) -> list[Request]:
        due = []
        while self._events and self._events[0][0] <= self._steps + _ROUNDING:
            request = heapq.heappop(self._events)[2]
            if request.result is not None:
                continue
            if self.generated(request) == len(request.answer):
                self._leave(request, request.ending)
            else:
                self._schedule_event(request)
            due.append(request)
        self._admit()
        return due

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
            self._schedule_event(request)

    def _schedule_event(self, request: Request) -> None:
        tokens = self.generated(request) + 1 if request.streamed else len(request.answer)
        heapq.heappush(self._events, (request.first_step + tokens - 1, next(self._order), request))

    def _leave(self, request: Request, reason: FinishReason) -> None:
        count = self.generated(request)
        request.finish(count, reason)
        if request in self.running:
            self.running.remove(request)
            self._generated += count
            self._retry_after.left(self._now - request.admitted_at)
            self._cache.reuse(request.prompt + request.answer[:count])

    def _step_s(self, batch: int) -> float:
        return self._settings.step_s + self._settings.step_slope_s * max(0, batch - 1)


class PrefixCache:
    """Blocks of computed tokens, identified by their hash and that of all preceding blocks."""

    def __init__(self, blocks: int) -> None:
        self._max_blocks = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def reuse(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix, leaving at least one to compute; then caches all blocks."""
        known, chain, all_blocks = 0, 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            all_blocks = all_blocks and chain in self._blocks
            known += all_blocks
            self._blocks[chain] = None
            self._blocks.move_to_end(chain)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return min(known * BLOCK, len(tokens) - 1)

    def forget(self) -> None:
        """Empty the cache."""
        self._blocks.clear()
