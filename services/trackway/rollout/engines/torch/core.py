"""The engine's step: admit, compute, sample, return. Synchronous, and driven by the engine's thread alone.

The thread steps the core while there is work, and runs calls between two steps. Calls arrive as closures in the input
queue. Results return to the event loop once per step. If the thread dies, a callback on the event loop fails the
pending calls, and later calls are rejected, so no call waits forever.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch

from trackway.rollout.engines.protocol import EngineStats, Generation, MemoryPart
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights, Row
from trackway.rollout.engines.torch.sampler import sample
from trackway.rollout.engines.torch.scheduler import Scheduler, Sequence, SlotAllocation
from trackway.rollout.engines.torch.weights import SleepingWeights
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, TopLogprobs

_GROUP_TOKENS = {"cpu": 1024}
"""Tokens per forward pass: few enough for a CPU's cache, many enough to fill a GPU."""


class FinishedSequence(NamedTuple):
    """A finished sequence and its result."""

    sequence: Sequence
    result: Generation | TrackwayError


class EngineCore:
    """A decoder with its weights, cache and sequences."""

    def __init__(self, decoder: Decoder, weights: DecoderWeights, version: int, slots: int) -> None:
        self.decoder, self.weights, self.version = decoder, weights, version
        self.scheduler = Scheduler(slots, decoder.max_len, _GROUP_TOKENS.get(decoder.device.type, 8192))
        self.sleeping: SleepingWeights | None = None
        """The weights while they sleep."""
        self._slots, self._cache = slots, decoder.cache(slots)
        self._steps = self._generated = self._prefilled = self._reused = 0

    def step(self) -> list[FinishedSequence]:
        """Generate one token for every running sequence. Returns the finished ones."""
        self._copy(self.scheduler.admit())
        groups = self.scheduler.groups()
        logits = torch.cat([self._compute(group) for group in groups])
        sequences = [sequence for group in groups for sequence in group]
        sampled = sample(logits, [r.params for r in sequences], [next(r.uniforms) for r in sequences])
        self._steps += 1
        self._generated += len(sequences)
        finished = map(self._accept, sequences, *sampled)
        return [output for output in finished if output is not None]

    def swap(self, weights: DecoderWeights, version: int) -> None:
        """Replace the weights: running sequences keep their KV; new ones do not reuse it."""
        self.weights, self.version = weights, version
        self.scheduler.slots.reset_prefix_cache()

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """The parts of the memory that are released."""
        parts: dict[MemoryPart, bool] = {
            "weights": self.sleeping is not None,
            "kv_cache": self._cache.slots < self._slots,
        }
        return frozenset(part for part, is_asleep in parts.items() if is_asleep)

    def drop_weights(self, sleeping: SleepingWeights) -> None:
        """Release the memory of the weights, of which this is a copy."""
        self.sleeping, self.weights = sleeping, sleeping.shapes

    def take_weights(self, weights: DecoderWeights) -> None:
        """End the sleep of the weights."""
        self.sleeping, self.weights = None, weights

    def drop_cache(self) -> None:
        """Release the memory of the KV cache, which no sequence may use. The prefix cache is lost."""
        self._cache = self.decoder.cache(slots=0)
        self.scheduler.slots.reset_prefix_cache()

    def take_cache(self) -> None:
        """Allocate the KV cache, empty."""
        self._cache = self.decoder.cache(self._slots)

    def abort(self, request_id: str | None = None) -> list[FinishedSequence]:
        """Finish the sequences with this request id, or all, with their tokens so far."""
        aborted = [
            sequence
            for sequence in (*self.scheduler.running, *self.scheduler.waiting)
            if request_id is None or sequence.request_id == request_id
        ]
        for sequence in aborted:
            self.scheduler.finish(sequence)
        return [FinishedSequence(sequence, sequence.result("abort")) for sequence in aborted]

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence whose caller has left. Does nothing if it is finished."""
        if sequence in self.scheduler.running or sequence in self.scheduler.waiting:
            self.scheduler.finish(sequence)

    def fail(self, cause: Exception) -> list[FinishedSequence]:
        """Fail all sequences after a step that raised, and clear the cache."""
        message = f"the engine's step failed: {type(cause).__name__}: {cause}; the same request would fail again"
        finished = [
            FinishedSequence(r, TrackwayError(ErrorCode.ENGINE_FAILED, message)) for r in self.scheduler.clear()
        ]
        self._cache.data.zero_()
        return finished

    def stats(self) -> EngineStats:
        """Totals since the start, and current numbers."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return EngineStats(running, waiting, self._steps, self._generated, self._prefilled, self._reused)

    def load(self) -> EngineLoad:
        """Requests and slots, each of which holds the longest context."""
        running, waiting, longest = len(self.scheduler.running), len(self.scheduler.waiting), self.decoder.max_len
        return EngineLoad(
            running=running,
            waiting=waiting,
            preemptions=0,
            kv_used=running * longest,
            kv_tokens=self._slots * longest,
            max_len=longest,
        )

    def _copy(self, allocations: abc.Sequence[SlotAllocation]) -> None:
        self._reused += sum(allocation.cached for allocation in allocations)
        copies = [allocation for allocation in allocations if allocation.source != allocation.slot]
        longest = max((allocation.cached for allocation in copies), default=0)
        self._cache.copy(
            [allocation.source for allocation in copies], [allocation.slot for allocation in copies], longest
        )

    def _compute(self, group: abc.Sequence[Sequence]) -> torch.Tensor:
        self._cache.reserve(max(sequence.length for sequence in group))
        rows = [Row(sequence.slot, sequence.cached, sequence.pending_ids) for sequence in group]
        if group[0].awaits_score:
            most_likely = group[0].params.prompt_logprobs or 0
            logits, group[0].prompt_logprobs = self.decoder.score_prompt(
                self.weights, self._cache, rows[0], most_likely
            )
        else:
            logits = self.decoder.forward(self.weights, self._cache, rows)
        self._prefilled += sum(sequence.pending for sequence in group if not sequence.output)
        self.scheduler.mark_computed(group)
        return logits

    def _accept(
        self, sequence: Sequence, token: int, logprob: float, top_logprobs: TopLogprobs
    ) -> FinishedSequence | None:
        scored = sequence.prompt_logprobs.logprobs if sequence.prompt_logprobs and not sequence.output else ()
        for value in (logprob, *scored):
            if not math.isfinite(value):
                return self._refuse(sequence, value)
        reason = sequence.accept(token, logprob, self.version, top_logprobs)
        if reason is None:
            return None
        self.scheduler.finish(sequence)
        return FinishedSequence(sequence, sequence.result(reason))

    def _refuse(self, sequence: Sequence, logprob: float) -> FinishedSequence:
        self._cache.clear(sequence.slot)
        sequence.cached = 0
        self.scheduler.finish(sequence)
        error = TrackwayError(
            ErrorCode.ENGINE_FAILED,
            f"expected a finite logprob, got {logprob} with weights version {self.version}; publish healthy weights",
            version=self.version,
        )
        return FinishedSequence(sequence, error)


T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineThread:
    """Runs one core. All methods are called on the same event loop."""

    def __init__(
        self,
        core: EngineCore,
        on_finished: Callable[[list[FinishedSequence]], None],
        on_death: Callable[[TrackwayError], None],
    ) -> None:
        self._core, self._on_finished, self._on_death = core, on_finished, on_death
        self._loop = asyncio.get_running_loop()
        self._input_queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._calls: set[Future] = set()
        self._frozen = self._stopping = self._idle = False
        self._progress = time.monotonic()
        self._cause: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="torch-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UNAVAILABLE when the thread is dead."""
        if self._cause is not None:
            raise _death(self._cause)

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` between two steps."""
        if self._idle:
            self._progress = time.monotonic()
        self._input_queue.put(work)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps and return its result."""
        self.check()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._calls.add(future)
        self.post(run)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    async def freeze(self, frozen: bool) -> None:
        """Stop or resume stepping. Returns when done."""

        def freeze() -> None:
            self._frozen = frozen

        await self.call(freeze)

    async def stop(self) -> None:
        """Stop the thread after the current step."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)
        await asyncio.to_thread(self._thread.join)

    def stuck_for(self) -> float:
        """Seconds since the last step or call while there is work. Infinite when the thread is dead."""
        if self._cause is not None or not self._thread.is_alive():
            return math.inf
        return 0.0 if self._idle and self._input_queue.empty() else time.monotonic() - self._progress

    # On the thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                self._run_busy_loop(self._core)
        except Exception as error:
            _log.exception("the engine's thread died; restart this replica")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _run_busy_loop(self, core: EngineCore) -> None:
        while not self._stopping:
            self._process_input_queue(wait=self._frozen or not core.scheduler.busy)
            if core.scheduler.busy and not self._frozen:
                finished = self._step(core)
                self._progress = time.monotonic()
                if finished:
                    self._loop.call_soon_threadsafe(self._on_finished, finished)

    def _process_input_queue(self, wait: bool) -> None:
        self._idle = wait
        try:
            work = self._input_queue.get(block=wait)
            self._idle = False
            while True:
                work()
                self._progress = time.monotonic()
                work = self._input_queue.get_nowait()
        except queue.Empty:
            return

    def _step(self, core: EngineCore) -> list[FinishedSequence]:
        try:
            return core.step()
        except Exception as error:
            _log.exception("the engine's step failed; its requests are answered with engine_failed")
            return core.fail(error)

    # On the event loop

    def _fail(self, cause: Exception) -> None:
        self._cause = cause
        self._on_death(_death(cause))
        for future in self._calls:
            if not future.done():
                future.set_exception(_death(cause))


def _death(cause: Exception) -> TrackwayError:
    return TrackwayError(
        ErrorCode.UNAVAILABLE,
        f"expected a running engine, got {type(cause).__name__} on its thread: {cause}; restart this replica",
    )
