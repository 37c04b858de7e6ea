"""An engine that says what a test tells it to, token by token, and may refuse first; no model can be told so."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from trackway.rollout.engines.engine import (
    Capability,
    EngineStats,
    FinishReason,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
)
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import WeightSpan
from trackway.wire.weights import Canary


class ScriptedEngine:
    """An `Engine`. The k-th token of a choice has logprob -(k + 1) / 8."""

    capabilities: frozenset[Capability] = frozenset()
    max_len = 1024
    paused = False
    version = 5

    def __init__(self) -> None:
        self.running = 0
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was told and what happened."""
        self.says: list[int] = []
        self.ends: FinishReason = "stop"
        self.refusals: list[TrackwayError] = []
        """Raised one after the other, by the first calls."""
        self.breaks_after: int | None = None
        """Tokens after which a stream raises."""
        self.endless = False
        """Says its last token for ever."""
        self.calls: list[SamplingParams] = []
        self.ended_early = threading.Event()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        pieces = [piece async for piece in self.stream(token_ids, params, request_id)]
        tokens = [token for piece in pieces for token in piece.token_ids]
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        return Generation(tokens, logprobs, self.ends, [WeightSpan(version=self.version, start=0, end=len(tokens))])

    async def stream(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[Piece, None]:
        self.calls.append(params)
        if self.refusals:
            raise self.refusals.pop(0)
        self.running += 1
        try:
            for place, token in enumerate(self.says):
                if place == self.breaks_after:
                    raise ZeroDivisionError("the engine broke")
                yield Piece([token], [-(place + 1) / 8], self.version)
            while self.endless:
                await asyncio.sleep(0.001)
                yield Piece([self.says[-1]], [-1.0], self.version)
            yield Piece([], [], self.version, self.ends)
        except (GeneratorExit, asyncio.CancelledError):
            self.ended_early.set()
            raise
        finally:
            self.running -= 1

    async def load_weights(self, folder: Path, version: int, canary: Canary | None) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def abort(self, request_id: str) -> int:
        return 0

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, parts: Sequence[MemoryPart]) -> None: ...

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None: ...

    def stuck_for(self) -> float:
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(self.running, 0, 0, 0, 0, 0)
