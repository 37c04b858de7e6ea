"""Request handling of a policy: wait for weights, generate, trace, reply.

An aborted generation resumes under the newest weights, so weight updates and sleep do not end it. The tokenizer is
loaded at its first use.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trackway.chat.tokenizer import ChatTokenizer
from trackway.rollout.engines.protocol import (
    Capability,
    Collector,
    Engine,
    FinishReason,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
)
from trackway.rollout.metrics import InferenceMetrics
from trackway.rollout.settings import RolloutSettings
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.serving.user_code import in_thread
from trackway.tracing import SpanHandle, add_event, add_incident, chat_span, token2text
from trackway.tracing import attributes as names
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import (
    AbortReply,
    EngineLoad,
    GenerateChoice,
    GenerateReply,
    GenerateRequest,
    ModelCard,
    PausedReply,
    PauseReply,
    SamplingParams,
    SleepMode,
    SleepReply,
    Usage,
    WeightInfo,
    WeightsReply,
    check_prompt_logprobs,
    choice_logprobs,
)
from trackway.wire.service import Ready
from trackway.wire.trajectory import Incident
from trackway.wire.weights import Verdict


class TokenText:
    """The tokenizer of a model folder."""

    def __init__(self, model_path: Path, tool_parser: str | None = None) -> None:
        self.model_path = model_path
        self._tool_parser = tool_parser
        self._tokenizer: ChatTokenizer | None = None
        self._loading = asyncio.Lock()

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids with special tokens, so that traces show the exact tokens."""
        tokenizer = await self.tokenizer()
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    async def required(self) -> ChatTokenizer:
        """The tokenizer itself. Raises INTERNAL when the folder lacks one."""
        try:
            return await self.tokenizer()
        except Exception as error:
            # transformers raises OSError, ValueError, KeyError or ImportError for a folder it cannot use.
            message = f"expected a tokenizer in {self.model_path}, got {type(error).__name__}: {error}; "
            remedy = "add one, or send token ids to /inference/v1/generate"
            raise TrackwayError(ErrorCode.INTERNAL, message + remedy) from error

    async def tokenizer(self) -> ChatTokenizer:
        """The tokenizer itself, loaded once. Raises transformers' error when the folder lacks one."""
        if self._tokenizer is None:
            async with self._loading:
                if self._tokenizer is None:
                    # Also when cancelled, it waits for the thread: two imports at a time may fail.
                    self._tokenizer = await in_thread(lambda: _load_tokenizer(self.model_path, self._tool_parser))
        return self._tokenizer


def _load_tokenizer(model_path: Path, tool_parser: str | None) -> ChatTokenizer:
    # The import takes seconds, and not every replica needs it.
    from transformers import AutoTokenizer

    return ChatTokenizer(AutoTokenizer.from_pretrained(model_path, local_files_only=True), tool_parser)


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


_log = logging.getLogger(__name__)


_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")


def required_card(card: ModelCard, name: str | None) -> ModelCard:
    """The served model, if this or nothing is its name. Raises MODEL_NOT_FOUND."""
    if name not in (None, card.id):
        message = f"model: expected {card.id!r}, which is served here, got {name!r}; see /v1/models"
        raise TrackwayError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
    return card


class RolloutService:
    """A policy on a replica: an engine, its weight watcher, and its names."""

    def __init__(
        self,
        engine: Engine,
        watcher: WeightWatcher,
        text: TokenText,
        settings: RolloutSettings,
        metrics: InferenceMetrics,
    ) -> None:
        self._engine, self._watcher, self._text, self._settings = engine, watcher, text, settings
        self._resumable = ResumableGeneration(engine, watcher)
        self._created = int(time.time())
        self._text_failed = False
        self._model, self._metrics = settings.model_name, metrics

    async def start(self) -> None:
        """Load the base weights and the latest published ones, and start following the store."""
        await self._engine.start()
        await self._watcher.start()

    async def stop(self) -> None:
        """Stop the watcher and the engine."""
        await self._watcher.stop()
        await self._engine.stop()

    async def ready(self) -> Ready:
        """Return whether the replica is ready. `broken` when only a restart can help."""
        stuck = self._engine.stuck_for()
        if stuck > self._settings.stuck_s:
            reason = f"the engine has made no progress on its work for {stuck:.0f} s"
            return Ready(ready=False, broken=True, reason=reason)
        if asleep := self._engine.asleep:
            return Ready(ready=False, reason=f"{' and '.join(sorted(asleep))} are asleep; POST /wake_up")
        loading = self._watcher.ready()
        if loading.ready and self._engine.paused:
            return Ready(ready=False, reason="generation is paused; POST /resume")
        return loading

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Continue a prompt with weights of at least the requested version."""
        self.served(request.model)
        self._supports(request)
        with self._metrics.timed(self._model), chat_span(self._model, request.sampling_params) as span:
            await self._catch_up(request.min_weight_version)
            request_id = request.request_id or uuid.uuid4().hex
            span.set(names.RESPONSE_ID, request_id)
            generation = await self._resumable.generate(request, request_id)
            await self._describe(span, request, generation)
        return self._reply(request_id, request, generation)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Like `generate`, in pieces; closing the iterator aborts the generation."""
        self.served(request.model)
        self._supports(request)
        collector, began = Collector(), time.perf_counter()
        with self._metrics.timed(self._model), chat_span(self._model, request.sampling_params) as span:
            span.set(names.STREAM, True)
            await self._catch_up(request.min_weight_version)
            request_id = request.request_id or uuid.uuid4().hex
            span.set(names.RESPONSE_ID, request_id)
            pieces = self._resumable.stream(request, request_id)
            try:
                async with aclosing(pieces):
                    async for piece in pieces:
                        if piece.token_ids and not collector.token_ids:
                            span.set(names.FIRST_CHUNK, waited := time.perf_counter() - began)
                            self._metrics.first_chunk(self._model, waited)
                        collector.add(piece)
                        yield piece
            except GeneratorExit:
                # Closing the stream after a stop string is no failure; a disconnected client cancels instead.
                await self._describe(span, request, collector.generation("stop"))
                return
            await self._describe(span, request, collector.generation())

    async def _catch_up(self, version: int) -> None:
        """Wait for the weights. A short wait after each update is normal and not recorded as an incident."""
        behind, have, began = self._watcher.behind(version), self._engine.version, time.monotonic()
        late = True
        try:
            await self._watcher.catch_up(version)
            late = time.monotonic() - began > self._settings.weights_late_s
        finally:
            if behind and late:
                add_incident(Incident.WEIGHTS_BEHIND, have=have, want=version)
            elif behind:
                add_event("weights_loaded", have=have, want=version, verdict=str(self._verdict))

    @property
    def is_dropped(self) -> bool:
        """True if the policy's weights are no longer in the store."""
        return self._watcher.is_dropped

    def weights(self) -> WeightsReply:
        """The loaded version and the newest published one."""
        return WeightsReply(
            version=self._engine.version,
            latest=self._watcher.latest,
            model=self._model,
            replica=self._settings.replica,
            verdict=self._verdict,
            transport=self._settings.weights_transport,
        )

    @property
    def _verdict(self) -> Verdict | None:
        return None if self._engine.judgement is None else self._engine.judgement.verdict

    async def load(self) -> EngineLoad:
        """The engine's requests and KV cache."""
        return await self._engine.load()

    def weight_info(self) -> WeightInfo:
        """The loaded version, in vLLM's format."""
        return WeightInfo(weight_version=str(self._engine.version))

    def served(self, name: str | None) -> ModelCard:
        """The served model, by its name or None. Raises MODEL_NOT_FOUND for any other name."""
        card = ModelCard(
            id=self._model,
            created=self._created,
            max_model_len=self._engine.max_len,
            root=str(self._settings.model_path),
        )
        return required_card(card, name)

    async def pause(self, mode: PauseMode) -> PauseReply:
        """Refuse new requests. Those in flight finish, are aborted, or are frozen."""
        async with self._watcher.control:
            await self._pause(mode)
        return self._paused()

    async def resume(self) -> PauseReply:
        """Accept requests again. Raises CONFLICT while memory is released."""
        async with self._watcher.control:
            await self._resume()
        return self._paused()

    def is_paused(self) -> PausedReply:
        """Return whether new requests are refused, in vLLM's format."""
        return PausedReply(is_paused=self._engine.paused)

    async def abort(self, request_ids: Sequence[str] | None) -> AbortReply:
        """Abort generations, which return their tokens so far."""
        return AbortReply(aborted=await self._resumable.abort(request_ids))

    async def sleep(self, mode: SleepMode, parts: Sequence[MemoryPart] | None) -> SleepReply:
        """Pause, then release memory for the trainer.

        With `retract`, requests in flight and new ones wait for the wake-up. Those in flight keep their tokens and
        continue under the weights of then.
        """
        self._needs_sleep()
        async with self._watcher.control:
            if mode == "retract":
                self._resumable.retract()
                await self._engine.pause("abort")
            else:
                await self._pause(mode)
            await self._engine.sleep(parts or _PARTS)
        return self.sleeping()

    async def wake_up(
        self, parts: Sequence[MemoryPart] | None, min_weight_version: int = 0, within_s: float | None = None
    ) -> SleepReply:
        """Allocate memory again, in stages if requested. Generation continues when all of it is back.

        Returns when weights of the requested version are loaded. Raises WEIGHTS_BEHIND when that takes too long.
        """
        self._needs_sleep()
        async with self._watcher.control:
            await self._engine.wake_up(parts or _PARTS)
            if not self._engine.asleep:
                await self._resume()
        if self._watcher.behind(min_weight_version):
            await self._watcher.catch_up(min_weight_version, within_s)
        return self.sleeping()

    def sleeping(self) -> SleepReply:
        """The released parts of the memory."""
        asleep = sorted(self._engine.asleep)
        return SleepReply(
            is_sleeping=bool(asleep),
            asleep=asleep,
            can_sleep=Capability.SLEEP in self._engine.capabilities,
            replica=self._settings.replica,
        )

    async def _pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._resumable.give_up_all()
        await self._engine.pause(mode)

    async def _resume(self) -> None:
        await self._engine.resume()
        self._resumable.release()

    def _paused(self) -> PauseReply:
        stats = self._engine.stats()
        return PauseReply(paused=self._engine.paused, running=stats.running, waiting=stats.waiting)

    def _supports(self, request: GenerateRequest) -> None:
        """Raise INVALID_REQUEST for what the engine cannot do."""
        params = request.sampling_params
        if params.prompt_logprobs is not None:
            if Capability.PROMPT_LOGPROBS not in self._engine.capabilities:
                expected = "an engine that scores prompts (torch, vllm, sglang)"
                message = f"prompt_logprobs: expected {expected}, got {self._settings.engine}; leave it out"
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="prompt_logprobs")
            check_prompt_logprobs([request.token_ids], params.prompt_logprobs)
        if params.logprobs and Capability.TOP_LOGPROBS not in self._engine.capabilities:
            message = (
                f"top_logprobs: expected an engine that returns them (torch, vllm, sglang), got {self._settings.engine}"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; leave it out", param="top_logprobs")
        if params.structured_outputs is not None and Capability.STRUCTURED_OUTPUTS not in self._engine.capabilities:
            message = (
                "response_format: expected an engine that guides its sampling (vllm with a tokenizer in model_path, "
                f"sglang with engine_tokenizer=true), got {self._settings.engine}; ask for JSON in the prompt, or give "
                "a tool"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="response_format")

    def _needs_sleep(self) -> None:
        if Capability.SLEEP not in self._engine.capabilities:
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST,
                f"expected an engine that can sleep, got {self._settings.engine} with enable_sleep=false; set "
                "enable_sleep: true on the rollout service",
            )

    async def _describe(self, span: SpanHandle, request: GenerateRequest, generation: Generation) -> None:
        tokens = len(request.token_ids), len(generation.token_ids), generation.cached_tokens
        self._metrics.count(self._model, *tokens)
        span.usage(*tokens)
        span.finish_reasons([generation.finish_reason])
        span.weight_versions(generation.spans)
        if span.recording and token2text():
            await self._show_text(span, request.token_ids[request.context_start :], generation.token_ids)

    async def _show_text(self, span: SpanHandle, prompt: list[int], output: list[int]) -> None:
        try:
            span.inputs({"messages": [{"role": "user", "content": await self._text.decode(prompt)}]})
            span.outputs({"messages": [{"role": "assistant", "content": await self._text.decode(output)}]})
        except Exception as error:
            # A missing tokenizer must not fail the generation.
            span.event("text_unavailable", reason=f"{type(error).__name__}: {error}")
            if not self._text_failed:
                _log.warning("traces will have no text: the tokenizer does not load: %s", error)
            self._text_failed = True

    def _reply(self, request_id: str, request: GenerateRequest, generation: Generation) -> GenerateReply:
        prompt, completion = len(request.token_ids), len(generation.token_ids)
        choice = GenerateChoice(
            finish_reason=generation.finish_reason,
            token_ids=generation.token_ids,
            logprobs=choice_logprobs(generation.token_ids, generation.logprobs, generation.top_logprobs),
            weight_versions=generation.spans,
        )
        return GenerateReply(
            request_id=request_id,
            model=self._model,
            created=int(time.time()),
            usage=Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion),
            choices=[choice],
            prompt_logprobs=generation.prompt_logprobs,
        )
