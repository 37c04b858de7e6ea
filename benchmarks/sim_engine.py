"""A simulated engine for load tests: it generates no real text but takes a model's time.

The rollout service loads it with `engine=benchmarks.sim_engine:SimEngine`. `engine_options` are the fields of
SimSettings.

The requests of a batch advance together, one token per step, and the duration of a step grows with the batch. The core
keeps one clock in steps: a request admitted at step s with n tokens to generate ends at s + n, whatever other requests
do. Only the seconds per step change. Each event costs O(log requests), and one timer, set to the next event, serves
the whole engine.
"""

import asyncio
import hashlib
import heapq
import itertools
import math
import os
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trackway.rollout.engines.admission import RetryAfterEstimator, asleep, check_prompt, overloaded, paused
from trackway.rollout.engines.protocol import (
    Capability,
    EngineStats,
    FinishReason,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
    Swapping,
)
from trackway.rollout.engines.weight_folder import tensors
from trackway.rollout.engines.weight_proof import Judgement, compare_digests, judge, require_accepted
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, SamplingParams
from trackway.wire.trajectory import WeightSpan, add_span
from trackway.wire.weights import WeightProof

SIM = "benchmarks.sim_engine:SimEngine"


def file_digests(folder: Path) -> dict[str, str]:
    """The sha256 of each tensor's bytes by name."""
    digests: dict[str, str] = {}
    for name, tensor in tensors(folder).items():
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            digests[name] = hashlib.sha256(file.read(tensor.end - tensor.start)).hexdigest()
    return digests


def use_sim() -> str:
    """Return the value of the setting `engine`, and let child processes of this one import it."""
    root, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    if root not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, path]))
    return SIM


class SimSettings(BaseModel):
    """Output and speed of the simulated engine."""

    model_config = ConfigDict(extra="forbid")

    vocab_size: int = Field(default=480, ge=4)
    """Vocabulary size. Like `eos_token_id`, the default is the tiny model's (`examples/tiny`)."""
    eos_token_id: int = Field(default=2, ge=0)
    """Last token of an answer that no limit truncates."""
    max_len: int = Field(default=4096, ge=2)
    """Longest prompt plus response in tokens, unless `max_model_len` is set."""
    response_tokens: float = Field(default=128.0, ge=1.0)
    """Mean length of an answer; each length derives from the request's seed and prompt."""
    response_spread: float = Field(default=0.5, ge=0.0, le=3.0)
    """Standard deviation of the length's logarithm (a log-normal distribution); 0 makes all answers equally long."""
    script: list[list[int]] = Field(default_factory=list)
    """Scripted answers by turn instead of random ones: a prompt that contains the first n, in order, gets the next
    (the last one repeats), so that an agent's tool calls run as scripted."""
    step_s: float = Field(default=0.01, gt=0.0)
    """Seconds per decode step with a single request."""
    step_slope_s: float = Field(default=0.0002, ge=0.0)
    """Additional seconds per step for each further request in the batch."""
    prefill_tokens_per_s: float = Field(default=20_000.0, gt=0.0)
    """Prefill speed of a single request; in a full batch it slows down as decoding does."""
    load_s: float = Field(default=0.0, ge=0.0)
    """Seconds to load a version of the weights, during which requests keep running."""
    cache_tokens: int = Field(default=1_000_000, ge=0)
    """Capacity of the prefix cache in tokens, evicted least recently used first; 0 disables it."""

    @model_validator(mode="after")
    def _ids_are_known(self) -> Self:
        largest = max([self.eos_token_id, *(token for turn in self.script for token in turn)])
        if largest >= self.vocab_size or not all(self.script):
            message = f"eos_token_id and script: expected turns of ids below {self.vocab_size}, got {largest} or no ids"
            raise ValueError(f"{message}; script the served model's own tokens")
        return self


_TAIL = 32
_LOGPROBS = [-0.02 - 0.05 * (place % 61) for place in range(1024)]


class Answers:
    """Generates answers: (tokens, logprobs, finish reason)."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self._script = [_bytes(turn) for turn in settings.script]

    def answer(
        self, prompt: Sequence[int], params: SamplingParams, limit: int, version: int
    ) -> tuple[list[int], list[float], FinishReason]:
        """The answer for a prompt, seed and version, always the same, of at most `limit` tokens."""
        draw = random.Random() if params.seed is None else random.Random(_digest(prompt, params.seed, version))
        tokens = self._scripted(prompt) if self._script else self._random(draw, params, limit)
        ending: FinishReason = "stop"
        stops = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, self._settings.eos_token_id}
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens) - 1) + 1
        if end > limit or (params.ignore_eos and not self._script and tokens[end - 1] not in stops):
            end, ending = min(end, limit), "length"
        shift = draw.randrange(1024)
        return tokens[:end], [_LOGPROBS[(token + shift) % 1024] for token in tokens[:end]], ending

    def _random(self, draw: random.Random, params: SamplingParams, limit: int) -> list[int]:
        settings = self._settings
        if params.ignore_eos:
            return self._words(draw, limit)
        spread = settings.response_spread
        length = settings.response_tokens * math.exp(spread * draw.gauss() - spread * spread / 2)
        return [*self._words(draw, min(limit, max(0, round(length) - 1))), settings.eos_token_id]

    def _words(self, draw: random.Random, count: int) -> list[int]:
        """Random tokens other than the end-of-sequence token."""
        eos = self._settings.eos_token_id
        return [token + (token >= eos) for token in draw.choices(range(self._settings.vocab_size - 1), k=count)]

    def _scripted(self, prompt: Sequence[int]) -> list[int]:
        """The script's turn after those in the prompt; if the prompt ends within a turn, the rest of it."""
        text, turn, start = _bytes(prompt), 0, 0
        while turn < len(self._script) and (position := text.find(self._script[turn], start)) >= 0:
            start = position + len(self._script[turn])
            turn += 1
        wanted = self._settings.script[min(turn, len(self._script) - 1)]
        tail = list(prompt[start // 4 :])
        begun = next((n for n in range(len(wanted) - 1, 0, -1) if tail[-n:] == wanted[:n]), 0)
        return wanted[begun:]


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _digest(prompt: Sequence[int], seed: int, version: int) -> int:
    return hash((seed, version, len(prompt), *prompt[-_TAIL:]))


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
    """Blocks of computed tokens, by a hash of the block and all preceding blocks."""

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


class SimEngine:
    """An `Engine` with meaningless tokens; of a proof it checks only the digests, since it scores nothing."""

    def __init__(self, settings: RolloutSettings) -> None:
        sleeps = {Capability.SLEEP} if settings.enable_sleep else set()
        scores = {Capability.TOP_LOGPROBS, Capability.PROMPT_LOGPROBS}
        lacking = {Capability.SLEEP, Capability.STRUCTURED_OUTPUTS, *scores}
        self.capabilities = frozenset(set(Capability) - lacking | sleeps)
        self._settings = settings
        self._sim = SimSettings.model_validate(settings.engine_options)
        self._max_len = settings.max_model_len or self._sim.max_len
        self._core = SimCore(self._sim, settings.max_num_seqs, settings.prefix_caching)
        self._answers = Answers(self._sim)
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
        await asyncio.sleep(self._sim.load_s)
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
        """Generate in pieces. A late event loop yields several tokens at once."""
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
        await asyncio.sleep(self._sim.load_s)
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

    async def load(self) -> EngineLoad:
        """Its requests. It has no KV cache."""
        stats = self.stats()
        return EngineLoad(
            running=stats.running, waiting=stats.waiting, preemptions=0, kv_used=0, kv_tokens=0, max_len=self.max_len
        )

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
        check_prompt(token_ids, self._max_len, self._sim.vocab_size)


def _pieces(request: Request, start: int, count: int) -> Iterable[Piece]:
    """The tokens `[start, count)`, split where the weights changed."""
    for span in request.spans(count):
        first = max(start, span.start)
        if first < span.end:
            tokens, logprobs = request.answer[first : span.end], request.logprobs[first : span.end]
            yield Piece(tokens, logprobs, span.version)
