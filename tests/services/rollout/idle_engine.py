"""An engine where nothing happens, to be given what a test needs."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from pathlib import Path

from trackway.rollout.engines.protocol import (
    Capability,
    Collector,
    EngineStats,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
    Swapping,
)
from trackway.rollout.engines.weight_proof import Judgement
from trackway.wire.rollout import EngineLoad, SamplingParams
from trackway.wire.weights import WeightProof


class IdleEngine:
    """An `Engine` that says nothing and takes any weights; `generate` is what `stream` tells."""

    capabilities: frozenset[Capability] = frozenset()
    asleep: frozenset[MemoryPart] = frozenset()
    max_len = 1024
    paused = False
    version = 0
    judgement: Judgement | None = None

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        made = Collector()
        async for piece in self.stream(token_ids, params, request_id):
            made.add(piece)
        return made.generation()

    async def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        yield Piece([], [], self.version, "stop")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def abort(self, request_id: str) -> int:
        return 0

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        async with swapping():
            self.version = version

    async def sleep(self, parts: Sequence[MemoryPart]) -> None: ...

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None: ...

    def stuck_for(self) -> float:
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0)

    async def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, preemptions=0, kv_used=0, kv_tokens=4096, max_len=self.max_len)
