"""Generation that survives weight updates: what an update cut goes on from its tokens under the new weights."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from trackway.rollout.engines.generation_builder import Collector
from trackway.rollout.engines.protocol import Engine, FinishReason, Generation, Piece
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.wire.rollout import GenerateRequest, SamplingParams

_NEXT_SEED = 1_000_003


@dataclass(eq=False)
class _Call:
    request_id: str
    given_up: bool = False
    """Someone asked for it to be cut, so it is not continued."""


class _Attempt(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    updates: int
    """The watcher's count when it began."""


class ResumableGeneration:
    """One engine and the watcher that updates it."""

    def __init__(self, engine: Engine, watcher: WeightWatcher) -> None:
        self._engine, self._watcher = engine, watcher
        self._calls: set[_Call] = set()

    async def generate(self, request: GenerateRequest, request_id: str) -> Generation:
        """As `Engine.generate`; waits at the gate while an update holds requests back."""
        made = Collector()
        with self._call(request_id) as call:
            while True:
                attempt = await self._attempt(request, made.token_ids)
                part = await self._engine.generate(attempt.prompt, attempt.params, request_id)
                made.add(part)
                if not self._goes_on(call, attempt, request, part.finish_reason, len(made.token_ids)):
                    return made.generation()

    async def stream(self, request: GenerateRequest, request_id: str) -> AsyncGenerator[Piece]:
        """As `Engine.stream`; waits at the gate while an update holds requests back."""
        made: list[int] = []
        with self._call(request_id) as call:
            while True:
                attempt = await self._attempt(request, made)
                pieces = self._engine.stream(attempt.prompt, attempt.params, request_id)
                async with aclosing(pieces):
                    async for piece in pieces:
                        made += piece.token_ids
                        goes_on = self._goes_on(call, attempt, request, piece.finish_reason, len(made))
                        yield replace(piece, finish_reason=None) if goes_on else piece
                        if piece.finish_reason is not None and not goes_on:
                            return

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """Cut these generations, or all, for good; returns how many there were."""
        wanted = None if request_ids is None else {*request_ids}
        found = [call for call in self._calls if not call.given_up and (wanted is None or call.request_id in wanted)]
        for call in found:
            call.given_up = True
        for request_id in {call.request_id for call in found}:
            await self._engine.abort(request_id)
        return len(found)

    def give_up_all(self) -> None:
        """What is in flight is not continued when it is cut: someone pauses the engine on purpose."""
        for call in self._calls:
            call.given_up = True

    @contextlib.contextmanager
    def _call(self, request_id: str) -> Iterator[_Call]:
        call = _Call(request_id)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)

    async def _attempt(self, request: GenerateRequest, made: Sequence[int]) -> _Attempt:
        await self._watcher.gate()
        params = request.sampling_params
        if made:
            seed = None if params.seed is None else params.seed + _NEXT_SEED * len(made)
            params = params.model_copy(update={"max_tokens": params.max_tokens - len(made), "seed": seed})
        return _Attempt([*request.token_ids, *made], params, self._watcher.updates)

    def _goes_on(
        self, call: _Call, attempt: _Attempt, request: GenerateRequest, reason: FinishReason | None, made: int
    ) -> bool:
        cut_by_update = reason == "abort" and not call.given_up and self._watcher.updates > attempt.updates
        return cut_by_update and made < request.sampling_params.max_tokens
