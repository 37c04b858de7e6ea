"""Generation across weight updates and sleep: an aborted generation resumes under the newest weights."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from trackway.rollout.engines.protocol import Collector, Engine, FinishReason, Generation, Piece
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, SamplingParams

_NEXT_SEED = 1_000_003
RETRACTED_S = 3600.0
"""Longest wait of a request for an engine that went to sleep. Callers' own deadlines are shorter."""


@dataclass(eq=False)
class _Call:
    request_id: str
    given_up: bool = False
    """Aborted on request, so it is not resumed."""


class _Attempt(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    cuts: int
    """Weight updates and retractions until its start."""


class ResumableGeneration:
    """Resumes generations that a weight update or a retraction has aborted."""

    def __init__(self, engine: Engine, watcher: WeightWatcher) -> None:
        self._engine, self._watcher = engine, watcher
        self._calls: set[_Call] = set()
        self._retractions = 0
        self._released = asyncio.Event()
        self._released.set()

    async def generate(self, request: GenerateRequest, request_id: str) -> Generation:
        """Implement `Engine.generate`. Waits while a weight update or a retraction holds requests back."""
        collector = Collector()
        with self._call(request_id) as call:
            while True:
                attempt = await self._attempt(request, collector.token_ids)
                part = await self._engine.generate(attempt.prompt, attempt.params, request_id)
                if _is_guided(request) and self._continues(call, attempt, request, part.finish_reason, 0):
                    continue  # start over: a grammar begins at the first token, and no token has been sent
                collector.add(part)
                if not self._continues(call, attempt, request, part.finish_reason, len(collector.token_ids)):
                    return collector.generation()

    async def stream(self, request: GenerateRequest, request_id: str) -> AsyncGenerator[Piece]:
        """Implement `Engine.stream`. Waits while a weight update or a retraction holds requests back."""
        token_ids: list[int] = []
        with self._call(request_id) as call:
            while True:
                attempt = await self._attempt(request, token_ids)
                pieces = self._engine.stream(attempt.prompt, attempt.params, request_id)
                async with aclosing(pieces):
                    async for piece in pieces:
                        token_ids += piece.token_ids
                        continues = self._continues(call, attempt, request, piece.finish_reason, len(token_ids))
                        if continues and token_ids and _is_guided(request):
                            raise _cut()
                        yield replace(piece, finish_reason=None) if continues else piece
                        if piece.finish_reason is not None and not continues:
                            return

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Abort these generations, or all, without resuming them. Returns their number."""
        wanted = None if request_ids is None else {*request_ids}
        aborted = [call for call in self._calls if not call.given_up and (wanted is None or call.request_id in wanted)]
        for call in aborted:
            call.given_up = True
        for request_id in {call.request_id for call in aborted}:
            await self._engine.abort(request_id)
        return len(aborted)

    def give_up_all(self) -> None:
        """Do not resume the generations in flight once they are aborted, as for an explicit pause."""
        for call in self._calls:
            call.given_up = True

    def retract(self) -> None:
        """Hold requests back until `release`; those that the engine aborts meanwhile resume then."""
        self._retractions += 1
        self._released.clear()

    def release(self) -> None:
        """Let the requests go on."""
        self._released.set()

    @property
    def _cuts(self) -> int:
        return self._watcher.updates + self._retractions

    @contextlib.contextmanager
    def _call(self, request_id: str) -> Iterator[_Call]:
        call = _Call(request_id)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)

    async def _attempt(self, request: GenerateRequest, generated: Sequence[int]) -> _Attempt:
        await self._until_released()
        await self._watcher.gate()
        params = request.sampling_params
        if generated:
            seed = None if params.seed is None else params.seed + _NEXT_SEED * len(generated)
            changes = {"max_tokens": params.max_tokens - len(generated), "seed": seed, "prompt_logprobs": None}
            params = params.model_copy(update=changes)
        return _Attempt([*request.token_ids, *generated], params, self._cuts)

    async def _until_released(self) -> None:
        try:
            async with asyncio.timeout(RETRACTED_S):
                await self._released.wait()
        except TimeoutError:
            message = f"expected the engine to wake up within {RETRACTED_S:.0f} s, got none; POST /wake_up, retry later"
            raise TrackwayError(ErrorCode.PAUSED, message) from None

    def _continues(
        self, call: _Call, attempt: _Attempt, request: GenerateRequest, reason: FinishReason | None, generated: int
    ) -> bool:
        was_cut = reason == "abort" and not call.given_up and self._cuts > attempt.cuts
        return was_cut and generated < request.sampling_params.max_tokens


def _is_guided(request: GenerateRequest) -> bool:
    return request.sampling_params.structured_outputs is not None


def _cut() -> TrackwayError:
    message = "the guided answer was cut by new weights, and its grammar cannot be entered in the middle; retry"
    return TrackwayError(ErrorCode.UNAVAILABLE, message)
