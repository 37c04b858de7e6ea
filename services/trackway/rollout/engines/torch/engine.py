"""The embedded engine: the async interface of a core that steps on its own thread.

Weights are read, checked and scored on another thread, in separate tensors. Only the reference is swapped between two
steps. Those that wait for their swap are dropped when the engine goes to sleep, and read again after the wake-up.
"""

import asyncio
import math
import time
from collections import abc
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from trackway.rollout.engines.admission import RetryAfterEstimator, asleep, check_prompt, overloaded, paused, too_long
from trackway.rollout.engines.protocol import (
    Capability,
    EngineStats,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
    Swapping,
)
from trackway.rollout.engines.torch.core import EngineCore, EngineThread, FinishedSequence
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.rollout.engines.torch.scheduler import Sequence
from trackway.rollout.engines.torch.weights import (
    SleepingWeights,
    device_of,
    dtype_of,
    load,
    load_merged,
    prove,
    release_cached_memory,
)
from trackway.rollout.engines.weight_folder import is_adapter
from trackway.rollout.engines.weight_proof import Judgement, require_accepted
from trackway.rollout.settings import DEFAULT_MAX_LEN, RolloutSettings
from trackway.system.process import choose_threads, usable_cores
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, SamplingParams
from trackway.wire.weights import WeightProof

Pending = asyncio.Future[Generation | TrackwayError]

_FIRST_GUESS_S = 5.0


class TorchEngine:
    """Continuous batching on torch; an `Engine`."""

    def __init__(self, settings: RolloutSettings) -> None:
        """Raises INVALID_REQUEST for a model that it cannot run, or not with this context length."""
        lacking = {Capability.STRUCTURED_OUTPUTS, *(() if settings.enable_sleep else (Capability.SLEEP,))}
        self.capabilities = frozenset(Capability) - lacking
        self._settings = settings
        self._config = DecoderConfig.read(settings.model_path)
        longest = settings.max_position_embeddings or self._config.max_positions
        self.max_len = settings.max_model_len or min(longest, DEFAULT_MAX_LEN)
        """Longest prompt plus response in tokens."""
        if problem := too_long(self.max_len, longest):
            raise TrackwayError(ErrorCode.INVALID_REQUEST, problem)
        device = device_of(settings)
        self._decoder = Decoder(self._config, self.max_len, device, dtype_of(settings, device))
        self._core: EngineCore | None = None
        self._waiting: dict[Sequence, Pending] = {}
        self._retry_after = RetryAfterEstimator(settings.max_num_seqs, _FIRST_GUESS_S)
        self.paused = self._broken = False
        self._memory = asyncio.Lock()
        """Held to read weights, to go to sleep and to wake up."""
        self._read: DecoderWeights | None = None
        """Weights that are to be swapped in."""
        self.judgement: Judgement | None = None

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        return self._core.version if self._core else 0

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """Parts of the memory that are released."""
        return self._core.asleep if self._core else frozenset()

    async def start(self) -> None:
        """Load the base weights and start the thread."""
        with _enough_memory("the start"):
            weights = await asyncio.to_thread(load, self._decoder, self._settings.model_path)
        torch.set_num_threads(self._settings.threads or self._choose_threads(weights))
        self._core = EngineCore(self._decoder, weights, 0, self._settings.max_num_seqs)
        self._thread = EngineThread(self._core, self._resolve, self._fail)

    def _choose_threads(self, weights: DecoderWeights) -> int:
        on_cpu = self._decoder.device.type == "cpu"
        return choose_threads(weights.parameters(), usable_cores()) if on_cpu else 1

    async def stop(self) -> None:
        """Abort requests in flight and stop the thread."""
        if self._core is None:
            return
        self.paused = True
        with suppress(TrackwayError):  # a dead thread holds no sequences
            await self._abort(None)
        await self._thread.stop()

    async def generate(self, token_ids: abc.Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt. See `Engine.generate`."""
        with self._in_flight(self._sequence(token_ids, params, request_id)) as done:
            return _result(await done)

    async def stream(
        self, token_ids: abc.Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[Piece, None]:
        """Like `generate`, token by token. See `Engine.stream`."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | None]()

        def on_token(piece: Piece) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        with self._in_flight(self._sequence(token_ids, params, request_id, on_token)) as done:
            done.add_done_callback(lambda _: pieces.put_nowait(None))
            while (piece := await pieces.get()) is not None:
                yield piece
            generation = _result(done.result())
            version = generation.spans[-1].version if generation.spans else self.version
            yield Piece([], [], version, generation.finish_reason, cached_tokens=generation.cached_tokens)

    async def abort(self, request_id: str) -> int:
        """Abort the requests with this id. They return their tokens so far."""
        return await self._abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and finish, abort or freeze those in flight."""
        self._started()
        self.paused = True
        await self._thread.freeze(mode == "keep")
        if mode == "abort":
            await self._abort(None)
        if mode == "wait" and self._waiting:
            await asyncio.wait([*self._waiting.values()])

    async def resume(self) -> None:
        """Accept requests again and continue frozen ones."""
        core = self._started()
        if core.asleep:
            raise asleep(core.asleep)
        self.paused = False
        await self._thread.freeze(False)

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        """All or nothing. See `Engine.load_weights`."""
        core = self._started()
        try:
            async with self._memory:
                if "weights" in core.asleep:
                    raise asleep(core.asleep)
                judgement = await self._read_weights(core, folder, version, proof)
            async with swapping():
                weights = self._read
                if weights is None:  # the engine went to sleep since
                    raise asleep(core.asleep)
                await self._thread.call(lambda: core.swap(weights, version))
                self.judgement = judgement
        finally:
            self._read = None

    async def _read_weights(self, core: EngineCore, folder: Path, version: int, proof: WeightProof) -> Judgement:
        if is_adapter(folder):
            weights = await asyncio.to_thread(load_merged, self._decoder, self._settings.model_path, folder)
        else:
            weights = await asyncio.to_thread(load, self._decoder, folder)
        judgement = await asyncio.to_thread(prove, self._decoder, weights, core.weights, proof)
        require_accepted(judgement, proof, version, folder)
        self._read = weights
        return judgement

    async def sleep(self, parts: abc.Sequence[MemoryPart]) -> None:
        """Release memory. See `Engine.sleep`. A GPU's weights go to pinned main memory, a CPU's to a file."""
        core = self._started()
        in_flight = sum(not done.done() for done in self._waiting.values())
        if not self.paused or in_flight:
            got = f"{in_flight} requests in flight" if self.paused else "one that is not paused"
            message = f"expected a paused engine without requests, got {got}; POST /pause?mode=wait or abort first"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        async with self._memory:
            if "weights" in parts and "weights" not in core.asleep:
                self._read = None
                # Passed as an argument, the weights would stay referenced by the thread shortly after its result.
                sleeping = await asyncio.to_thread(lambda: SleepingWeights(core.weights))
                await self._thread.call(lambda: core.drop_weights(sleeping))
            if "kv_cache" in parts:
                await self._thread.call(core.drop_cache)
            await asyncio.to_thread(release_cached_memory, self._decoder.device)

    async def wake_up(self, parts: abc.Sequence[MemoryPart]) -> None:
        """Allocate memory. See `Engine.wake_up`. Raises ENGINE_FAILED if the weights are not those that slept."""
        core = self._started()
        async with self._memory:
            with _enough_memory("the wake-up"):
                if "weights" in parts and core.sleeping is not None:
                    weights = await asyncio.to_thread(self._restored, core.sleeping)
                    await self._thread.call(lambda: core.take_weights(weights))
                if "kv_cache" in parts and "kv_cache" in core.asleep:
                    await self._thread.call(core.take_cache)

    def _restored(self, sleeping: SleepingWeights) -> DecoderWeights:
        try:
            return sleeping.restored()
        except TrackwayError:
            self._broken = True
            raise

    def stuck_for(self) -> float:
        """Seconds since the thread's last step or call while it has work. Infinite when thread or weights are lost."""
        if self._broken:
            return math.inf
        return self._thread.stuck_for() if self._core else 0.0

    def stats(self) -> EngineStats:
        """Read without a lock: the counters may be of two adjacent steps."""
        return self._started().stats()

    async def load(self) -> EngineLoad:
        """Implement `Engine.load`, read without a lock."""
        return self._started().load()

    @contextmanager
    def _in_flight(self, sequence: Sequence) -> Iterator[Pending]:
        """Add the sequence to the core. Remove it if the caller leaves before it is finished."""
        core = self._started()
        self._thread.check()
        done: Pending = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = done
        self._thread.post(lambda: core.scheduler.waiting.append(sequence))
        began = time.monotonic()
        try:
            yield done
        finally:
            self._retry_after.left(time.monotonic() - began, len(self._waiting))
            del self._waiting[sequence]
            if done.cancelled() or not done.done():
                self._thread.post(lambda: core.drop(sequence))

    def _resolve(self, finished: list[FinishedSequence]) -> None:
        for sequence, result in finished:
            done = self._waiting.get(sequence)
            if done is not None and not done.done():
                done.set_result(result)

    def _fail(self, error: TrackwayError) -> None:
        self._resolve([FinishedSequence(sequence, error) for sequence in self._waiting])

    async def _abort(self, request_id: str | None) -> int:
        core = self._started()
        finished = await self._thread.call(lambda: core.abort(request_id))
        self._resolve(finished)
        return len(finished)

    def _started(self) -> EngineCore:
        if self._core is None:
            raise TrackwayError(
                ErrorCode.UNAVAILABLE, "expected a started engine, got one that is starting; retry later"
            )
        return self._core

    def _sequence(
        self,
        token_ids: abc.Sequence[int],
        params: SamplingParams,
        request_id: str,
        on_token: Callable[[Piece], None] | None = None,
    ) -> Sequence:
        self._admissible(token_ids)
        stops = frozenset(params.stop_token_ids)
        return Sequence(
            request_id=request_id,
            prompt=list(token_ids),
            params=params,
            stops=stops if params.ignore_eos else stops | self._config.eos_token_ids,
            limit=min(params.max_tokens, self.max_len - len(token_ids)),
            on_token=on_token,
        )

    def _admissible(self, token_ids: abc.Sequence[int]) -> None:
        if self.paused:
            raise paused()
        slots, bound = self._settings.max_num_seqs, self._settings.max_num_seqs + self._settings.max_queue
        if len(self._waiting) >= bound:
            raise overloaded(bound, self._retry_after.turn_away(max(0, len(self._waiting) - slots), time.monotonic()))
        check_prompt(token_ids, self.max_len, self._config.vocab_size)


def _result(result: Generation | TrackwayError) -> Generation:
    if isinstance(result, TrackwayError):
        raise result
    return result


@contextmanager
def _enough_memory(what: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        message = f"expected free memory for {what}, got {error}; free it, then try again"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
