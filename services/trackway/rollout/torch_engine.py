"""The embedded engine: a thread that steps the core, and an async face that talks to it.

Everything that touches the core runs on the thread: calls arrive as closures in one inbox and are obeyed between two
steps, results go back to the event loop once per step. Weights are read, checked and scored on another thread, on a
set of tensors of their own; only the exchange of the reference happens between steps.
"""

import asyncio
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

from trackway.rollout.checkpoint import read_weights
from trackway.rollout.core import Ended, EngineCore
from trackway.rollout.engine import Capability, EngineStats, Generation, PauseMode
from trackway.rollout.model_config import DecoderConfig
from trackway.rollout.scheduler import Continuation
from trackway.rollout.settings import RolloutSettings
from trackway.rollout.torch_model import Decoder, DecoderWeights
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Canary

T = TypeVar("T")
Pending = asyncio.Future[Generation | TrackwayError]

_log = logging.getLogger(__name__)
_DEFAULT_MAX_LEN = 4096
# Rounding of bfloat16 alone moves a logprob by up to 0.055; a stale lm_head moves it by 0.3 on average.
_NOISE = {torch.float32: 0.0, torch.bfloat16: 0.15}


class TorchEngine:
    """Continuous batching on torch; an `Engine`."""

    capabilities = frozenset({Capability.WAIT, Capability.ABORT, Capability.KEEP, Capability.SPANS, Capability.CANARY})

    def __init__(self, settings: RolloutSettings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._config = DecoderConfig.read(settings.model_path)
        self._max_len = settings.max_model_len or min(self._config.max_positions, _DEFAULT_MAX_LEN)
        device = _device(settings)
        self._decoder = Decoder(self._config, self._max_len, device, _dtype(settings, device))
        self._core: EngineCore | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[Continuation, Pending] = {}
        self._paused = self._frozen = self._stopping = False

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        return self._core.version if self._core else 0

    @property
    def max_len(self) -> int:
        """Longest prompt plus response in tokens."""
        return self._max_len

    @property
    def paused(self) -> bool:
        """Whether new requests are refused."""
        return self._paused

    async def start(self) -> None:
        """Load the base weights and start the thread."""
        weights = await asyncio.to_thread(self._read, self._settings.model_path, None)
        self._core = EngineCore(self._decoder, weights, 0, self._settings.max_num_seqs)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(self._core,), name="torch-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Abort what is in flight and end the thread."""
        if self._core is None:
            return
        await self.pause("abort")

        def stop() -> None:
            self._stopping = True

        await self._call(stop)
        await asyncio.to_thread(self._thread.join)

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt; see `Engine.generate`."""
        self._admissible(token_ids)
        core, request = self._started(), self._request(token_ids, params, request_id)
        done: Pending = asyncio.get_running_loop().create_future()
        self._waiting[request] = done
        self._inbox.put(lambda: core.scheduler.waiting.append(request))
        try:
            result = await done
        except asyncio.CancelledError:
            self._inbox.put(lambda: core.drop(request))
            raise
        finally:
            self._waiting.pop(request, None)
        if isinstance(result, TrackwayError):
            raise result
        return result

    async def abort(self, request_id: str) -> int:
        """Cut the requests of this id; they return what they have."""
        return await self._abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and finish, cut or freeze those in flight."""
        self._paused = True
        await self._freeze(mode == "keep")
        if mode == "abort":
            await self._abort(None)
        if mode == "wait" and self._waiting:
            await asyncio.wait([*self._waiting.values()])

    async def resume(self) -> None:
        """Take requests again."""
        self._paused = False
        await self._freeze(False)

    async def load_weights(self, folder: Path, version: int, canary: Canary | None) -> None:
        """All or nothing; see `Engine.load_weights`."""
        core = self._started()
        weights = await asyncio.to_thread(self._read, folder, canary)
        await self._call(lambda: core.swap(weights, version))

    def stats(self) -> EngineStats:
        """Read without a lock: the counts may be of two neighbouring steps."""
        return self._started().stats()

    # The engine's thread

    def _run(self, core: EngineCore) -> None:
        with torch.inference_mode():
            while not self._stopping:
                self._obey(wait=self._frozen or not core.scheduler.busy)
                if core.scheduler.busy and not self._frozen:
                    self._deliver(self._step(core))

    def _obey(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _step(self, core: EngineCore) -> list[Ended]:
        try:
            return core.step()
        except Exception as error:
            _log.exception("the engine's step failed; its requests are answered with engine_failed")
            return core.fail(error)

    def _deliver(self, ended: list[Ended]) -> None:
        if ended:
            self._loop.call_soon_threadsafe(self._resolve, ended)

    # The event loop's side

    def _resolve(self, ended: list[Ended]) -> None:
        for request, result in ended:
            done = self._waiting.get(request)
            if done is not None and not done.done():
                done.set_result(result)

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` between two steps and wait for its value."""
        future: Future[T] = Future()

        def obey() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(obey)
        return await asyncio.wrap_future(future)

    async def _abort(self, request_id: str | None) -> int:
        core = self._started()
        ended = await self._call(lambda: core.abort(request_id))
        self._resolve(ended)
        return len(ended)

    async def _freeze(self, frozen: bool) -> None:
        def freeze() -> None:
            self._frozen = frozen

        await self._call(freeze)

    def _started(self) -> EngineCore:
        if self._core is None:
            raise TrackwayError(ErrorCode.UNAVAILABLE, "expected a started engine, got one that is starting; ask again")
        return self._core

    def _request(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Continuation:
        stops = frozenset(params.stop_token_ids)
        return Continuation(
            request_id=request_id,
            prompt=list(token_ids),
            params=params,
            stops=stops if params.ignore_eos else stops | self._config.eos_token_ids,
            limit=min(params.max_tokens, self._max_len - len(token_ids)),
        )

    def _admissible(self, token_ids: Sequence[int]) -> None:
        if self._paused:
            raise TrackwayError(ErrorCode.PAUSED, "generation is paused; ask again after /resume")
        bound = self._settings.max_num_seqs + self._settings.max_queue
        if len(self._waiting) >= bound:
            raise TrackwayError(
                ErrorCode.OVERLOADED,
                f"expected fewer than {bound} requests in flight, got one more; ask again later or add replicas",
                bound=bound,
            )
        if not 0 < len(token_ids) < self._max_len:
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST,
                f"expected 1 to {self._max_len - 1} prompt tokens, got {len(token_ids)}; raise max_model_len",
            )
        if min(token_ids) < 0 or max(token_ids) >= self._config.vocab_size:
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST,
                f"expected token ids in 0..{self._config.vocab_size - 1}, got {min(token_ids)}..{max(token_ids)}; "
                "use the served model's tokenizer",
            )

    def _read(self, folder: Path, canary: Canary | None) -> DecoderWeights:
        with torch.inference_mode():
            weights = read_weights(folder, self._config, self._decoder.device, self._decoder.dtype)
            if canary is not None:
                tolerance = max(canary.tolerance, _NOISE[self._decoder.dtype])
                check_canary(self._decoder.score(weights, canary.token_ids), canary, tolerance, folder)
            return weights


def check_canary(scored: list[float], canary: Canary, tolerance: float, folder: Path) -> None:
    """Raises WEIGHTS_CORRUPT unless all logprobs are numbers within the tolerance of the publisher's."""
    same_length = len(scored) == len(canary.logprobs)
    differences = [abs(ours - theirs) for ours, theirs in zip(scored, canary.logprobs, strict=False)]
    if same_length and all(difference <= tolerance for difference in differences):  # False for NaN
        return
    worst = max(differences, key=lambda d: math.inf if math.isnan(d) else d, default=0.0)
    raise TrackwayError(
        ErrorCode.WEIGHTS_CORRUPT,
        f"expected {len(scored)} canary logprobs within {tolerance} of the publisher's, got {len(canary.logprobs)} "
        f"with a difference of {worst:.3g} for the weights in {folder}; publish the weights that the trainer scored, "
        "in full, lm_head.weight included",
        difference=str(worst),
    )


def _device(settings: RolloutSettings) -> torch.device:
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(settings: RolloutSettings, device: torch.device) -> torch.dtype:
    name = settings.dtype if settings.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32
