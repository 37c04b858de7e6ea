"""The engine's step: admit, compute, sample, hand out. Synchronous and single-threaded; `engine.py` drives it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from trackway.rollout.engines.protocol import EngineStats, Generation
from trackway.rollout.engines.torch.batch import Row
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.engines.torch.sampler import sample
from trackway.rollout.engines.torch.scheduler import Continuation, Scheduler
from trackway.rollout.engines.torch.slots import Place
from trackway.wire.errors import ErrorCode, TrackwayError

_GROUP_TOKENS = {"cpu": 1024}
"""Tokens of one forward: few enough for a CPU's cache, many enough to fill a GPU."""


class Ended(NamedTuple):
    """A request that is over, and how."""

    request: Continuation
    result: Generation | TrackwayError


class EngineCore:
    """One decoder, its weights, its cache and its requests."""

    def __init__(self, decoder: Decoder, weights: DecoderWeights, version: int, slots: int) -> None:
        self.decoder, self.weights, self.version = decoder, weights, version
        self.scheduler = Scheduler(slots, decoder.max_len, _GROUP_TOKENS.get(decoder.device.type, 8192))
        self._cache = decoder.cache(slots)
        self._steps = self._generated = self._prefilled = self._reused = 0

    def step(self) -> list[Ended]:
        """Give every running request one more token."""
        self._copy(self.scheduler.admit())
        groups = self.scheduler.groups()
        logits = torch.cat([self._compute(group) for group in groups])
        requests = [request for group in groups for request in group]
        tokens, logprobs = sample(logits, [r.params for r in requests], [next(r.draws) for r in requests])
        self._steps += 1
        self._generated += len(requests)
        ended = map(self._accept, requests, tokens, logprobs)
        return [end for end in ended if end is not None]

    def swap(self, weights: DecoderWeights, version: int) -> None:
        """Go on with other weights: running requests keep their KV, no new one may reuse it."""
        self.weights, self.version = weights, version
        self.scheduler.slots.forget()

    def abort(self, request_id: str | None = None) -> list[Ended]:
        """End the requests of an id, or all, with what they have."""
        found = [
            request
            for request in (*self.scheduler.running, *self.scheduler.waiting)
            if request_id is None or request.request_id == request_id
        ]
        for request in found:
            self.scheduler.leave(request)
        return [Ended(request, request.result("abort")) for request in found]

    def drop(self, request: Continuation) -> None:
        """End a request that nobody waits for any more; nothing when it is over already."""
        if request in self.scheduler.running or request in self.scheduler.waiting:
            self.scheduler.leave(request)

    def fail(self, cause: Exception) -> list[Ended]:
        """End all requests after a step that raised; the cache starts anew."""
        message = f"the engine's step failed: {type(cause).__name__}: {cause}; the same request would fail again"
        ended = [Ended(r, TrackwayError(ErrorCode.ENGINE_FAILED, message)) for r in self.scheduler.clear()]
        self._cache.data.zero_()
        return ended

    def stats(self) -> EngineStats:
        """Counts since the start and of now."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return EngineStats(running, waiting, self._steps, self._generated, self._prefilled, self._reused)

    def _copy(self, places: Sequence[Place]) -> None:
        self._reused += sum(place.cached for place in places)
        copies = [place for place in places if place.source != place.slot]
        longest = max((place.cached for place in copies), default=0)
        self._cache.copy([place.source for place in copies], [place.slot for place in copies], longest)

    def _compute(self, group: Sequence[Continuation]) -> torch.Tensor:
        self._cache.reserve(max(request.length for request in group))
        rows = [Row(request.slot, request.cached, request.pending_ids) for request in group]
        logits = self.decoder.forward(self.weights, self._cache, rows)
        self._prefilled += sum(request.pending for request in group if not request.output)
        self.scheduler.computed(group)
        return logits

    def _accept(self, request: Continuation, token: int, logprob: float) -> Ended | None:
        if not math.isfinite(logprob):
            return self._refuse(request, logprob)
        reason = request.accept(token, logprob, self.version)
        if reason is None:
            return None
        self.scheduler.leave(request)
        return Ended(request, request.result(reason))

    def _refuse(self, request: Continuation, logprob: float) -> Ended:
        self._cache.clear(request.slot)
        request.cached = 0
        self.scheduler.leave(request)
        error = TrackwayError(
            ErrorCode.ENGINE_FAILED,
            f"expected a finite logprob, got {logprob} with weights version {self.version}; publish healthy weights",
            version=self.version,
        )
        return Ended(request, error)
