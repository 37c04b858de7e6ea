"""The simulated engine: generates no real text but takes a model's time. For load tests on any machine.

It is cheap: one timer for the whole engine, set to the next event.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from trackway.rollout.engines.admission import asleep, check_prompt, overloaded, paused
from trackway.rollout.engines.protocol import (
    Capability,
    EngineStats,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
    Swapping,
)
from trackway.rollout.engines.sim.answers import Answers
from trackway.rollout.engines.sim.model import Request, SimCore
from trackway.rollout.engines.weight_folder import file_digests
from trackway.rollout.engines.weight_proof import Judgement, compare_digests, judge, require_accepted
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import WeightProof


class SimEngine:
    """An `Engine` with meaningless tokens; of a proof it checks only the digests, since it scores nothing."""

    def __init__(self, settings: RolloutSettings) -> None:
        sleeps = {Capability.SLEEP} if settings.enable_sleep else set()
        lacking = {Capability.SLEEP, Capability.TOP_LOGPROBS, Capability.STRUCTURED_OUTPUTS}
        self.capabilities = frozenset(set(Capability) - lacking | sleeps)
        self._settings = settings
        self._max_len = settings.max_model_len or settings.sim.max_len
        self._core = SimCore(settings.sim, settings.max_num_seqs, settings.prefix_caching)
        self._answers = Answers(settings.sim)
        self._updates: dict[Request, asyncio.Event] = {}
        self._clock: Callable[[], float] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._paused = False
        self._asleep: set[MemoryPart] = set()
        self._held: dict[str, str] = {}
        self.judgement: Judgement | None = None

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        return self._core.version

    @property
    def max_len(self) -> int:
        """Longest prompt plus response in tokens."""
        return self._max_len

    @property
    def paused(self) -> bool:
        """Whether new requests are refused."""
        return self._paused

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """Parts of its memory that are given back."""
        return frozenset(self._asleep)

    async def start(self) -> None:
        """Become ready after the simulated load time."""
        await asyncio.sleep(self._settings.sim.load_s)
        self._clock = asyncio.get_running_loop().time

    async def stop(self) -> None:
        """Stop; requests in flight return as aborted."""
        if self._clock is None:
            return
        await self.pause("abort")
        self._clock = None

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt; see `Engine.generate`."""
        request = self._request(token_ids, params, request_id, streamed=False)
        try:
            await self._updates[request].wait()
        finally:
            self._forget(request)
        assert request.result is not None
        return request.result

    async def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        """As `generate`, in pieces; a late event loop yields several tokens at once."""
        request = self._request(token_ids, params, request_id, streamed=True)
        updated, sent = self._updates[request], 0
        try:
            while request.result is None:
                await updated.wait()
                updated.clear()
                for piece in _pieces(request, sent, self._core.generated(request)):
                    sent += len(piece.token_ids)
                    yield piece
            result, version = request.result, request.cuts[-1][1] if request.cuts else self.version
            yield Piece([], [], version, result.finish_reason, weight_versions=result.spans)
        finally:
            self._forget(request)

    async def abort(self, request_id: str) -> int:
        """Abort the requests with this id; they return their tokens so far."""
        return self._abort([request for request in self._updates if request.request_id == request_id])

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and finish, abort or freeze those in flight."""
        self._paused = True
        self._turn()
        self._core.frozen = mode == "keep"
        if mode == "abort":
            self._abort([*self._updates])
        self._set_timer()
        if mode == "wait":
            await self._idle.wait()

    async def resume(self) -> None:
        """Accept requests again and continue frozen ones."""
        if self._asleep:
            raise asleep(self._asleep)
        self._turn()
        self._paused = self._core.frozen = False
        self._set_timer()

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        """Wait for the simulated load time, then switch to the version; reads files only for published digests."""
        await asyncio.sleep(self._settings.sim.load_s)
        judgement = None
        if proof.digests:
            held = await asyncio.to_thread(file_digests, folder)
            published = {tensor.name: tensor.sha256[tensor.dtype] for tensor in proof.digests}
            digests = compare_digests(held, published, self._held)
            judgement = judge(proof.model_copy(update={"probes": []}), "float32", [], digests)
            require_accepted(judgement, proof, version, folder)
            self._held = held
        async with swapping():
            self._turn()
            self._core.swap(version)
            self.judgement = judgement

    async def sleep(self, parts: Sequence[MemoryPart]) -> None:
        """Release the simulated memory, which empties the cache."""
        if not self._paused:
            raise TrackwayError(ErrorCode.CONFLICT, "expected a paused engine, got a running one; POST /pause first")
        self._asleep |= {*parts}
        if "kv_cache" in parts:
            self._core.forget()

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Take it again."""
        self._asleep -= {*parts}

    def stuck_for(self) -> float:
        """Seconds for which the next event is overdue."""
        at = self._core.next_at()
        return 0.0 if at is None or self._clock is None else max(0.0, self._clock() - at)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._core.stats()

    def _turn(self) -> None:
        """Advance the core to now, wake the requests with new tokens, and reset the timer."""
        for request in self._core.advance(self._now()):
            if request in self._updates:
                self._updates[request].set()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._core.running or self._core.waiting:
            self._idle.clear()
        else:
            self._idle.set()
        at = self._core.next_at()
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._turn)

    def _abort(self, requests: Iterable[Request]) -> int:
        self._turn()
        cut = [request for request in requests if request.result is None]
        self._core.end(cut)
        for request in cut:
            self._updates[request].set()
        self._set_timer()
        return len(cut)

    def _forget(self, request: Request) -> None:
        del self._updates[request]
        if request.result is None:
            self._core.end([request])
            self._set_timer()

    def _now(self) -> float:
        if self._clock is None:
            raise TrackwayError(ErrorCode.UNAVAILABLE, "expected a started engine, got one that is not; retry later")
        return self._clock()

    def _request(self, token_ids: Sequence[int], params: SamplingParams, request_id: str, streamed: bool) -> Request:
        self._turn()
        self._admissible(token_ids)
        prompt, limit = list(token_ids), min(params.max_tokens, self._max_len - len(token_ids))
        answer, logprobs, ending = self._answers.answer(prompt, params, limit, self.version)
        request = Request(request_id, prompt, answer, logprobs, ending, streamed)
        self._updates[request] = asyncio.Event()
        self._core.add(request)
        self._set_timer()
        return request

    def _admissible(self, token_ids: Sequence[int]) -> None:
        if self._paused:
            raise paused()
        bound = self._settings.max_num_seqs + self._settings.max_queue
        if len(self._core.running) + len(self._core.waiting) >= bound:
            raise overloaded(bound, self._core.turn_away())
        check_prompt(token_ids, self._max_len, self._settings.sim.vocab_size)


def _pieces(request: Request, start: int, count: int) -> Iterable[Piece]:
    """The tokens `[start, count)`, split where the weights changed."""
    for span in request.spans(count):
        first = max(start, span.start)
        if first < span.end:
            tokens, logprobs = request.answer[first : span.end], request.logprobs[first : span.end]
            yield Piece(tokens, logprobs, span.version)
