"""An engine that says what a test tells it to, token by token, and may refuse first; no model can be told so."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence

from tests.services.rollout.idle_engine import IdleEngine
from trackway.rollout.engines.protocol import Capability, EngineStats, FinishReason, Piece
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams


class ScriptedEngine(IdleEngine):
    """The k-th token of a choice has logprob -(k + 1) / 8."""

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
        self.capabilities: frozenset[Capability] = frozenset()
        self.ended_early = threading.Event()

    async def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
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

    def stats(self) -> EngineStats:
        return EngineStats(self.running, 0, 0, 0, 0, 0)
