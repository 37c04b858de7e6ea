"""What the routes do: wait for the weights, generate, trace, and answer in the wire's words."""

import logging
import time
import uuid

from trackway.rollout.engine import Engine, Generation
from trackway.rollout.text import TokenText
from trackway.rollout.weights import WeightWatcher
from trackway.tracing import SpanHandle, add_event, add_incident, chat_span, token2text
from trackway.wire.health import Ready
from trackway.wire.rollout import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateReply,
    GenerateRequest,
    ModelCard,
    ModelList,
    PauseReply,
    PauseRequest,
    TokenLogprob,
    Usage,
    WeightsReply,
)
from trackway.wire.tracing import Incident

_log = logging.getLogger(__name__)


class RolloutService:
    """One replica: an engine, the weights it follows, and its names."""

    def __init__(
        self, engine: Engine, watcher: WeightWatcher, text: TokenText, model: str, replica: str, late_s: float
    ) -> None:
        self._engine, self._watcher, self._text = engine, watcher, text
        self._model, self._replica, self._late_s = model, replica, late_s
        self._created = int(time.time())
        self._text_failed = False

    async def start(self) -> None:
        """Load the base weights, then the latest published ones, and go on following the store."""
        await self._engine.start()
        await self._watcher.start()

    async def stop(self) -> None:
        """End the watching and the engine."""
        await self._watcher.stop()
        await self._engine.stop()

    async def ready(self) -> Ready:
        """Ready to generate now."""
        if self._engine.paused:
            return Ready(ready=False, reason="generation is paused; POST /resume")
        return self._watcher.ready()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Continue one prompt with weights of at least the version asked for."""
        with chat_span(self._model, request.sampling_params) as span:
            await self._catch_up(request.min_weight_version)
            request_id = request.request_id or uuid.uuid4().hex
            generation = await self._engine.generate(request.token_ids, request.sampling_params, request_id)
            await self._describe(span, request, generation)
        return self._reply(request_id, request, generation)

    async def _catch_up(self, version: int) -> None:
        """Wait for the weights; every publish makes the first requests wait a moment, which is no incident."""
        behind, have, began = self._watcher.behind(version), self._engine.version, time.monotonic()
        late = True
        try:
            await self._watcher.catch_up(version)
            late = time.monotonic() - began > self._late_s
        finally:
            if behind and late:
                add_incident(Incident.WEIGHTS_BEHIND, have=have, want=version)
            elif behind:
                add_event("weights_loaded", have=have, want=version)

    def weights(self) -> WeightsReply:
        """The version held and the newest one seen."""
        return WeightsReply(
            version=self._engine.version, latest=self._watcher.latest, model=self._model, replica=self._replica
        )

    def models(self) -> ModelList:
        """The one model."""
        card = ModelCard(id=self._model, created=self._created, max_model_len=self._engine.max_len)
        return ModelList(data=[card])

    async def pause(self, request: PauseRequest) -> PauseReply:
        """Refuse new requests; those in flight finish, are cut, or are frozen."""
        await self._engine.pause(request.mode)
        return self._paused()

    async def resume(self) -> PauseReply:
        """Take requests again."""
        await self._engine.resume()
        return self._paused()

    def _paused(self) -> PauseReply:
        stats = self._engine.stats()
        return PauseReply(paused=self._engine.paused, running=stats.running, waiting=stats.waiting)

    async def _describe(self, span: SpanHandle, request: GenerateRequest, generation: Generation) -> None:
        span.usage(len(request.token_ids), len(generation.token_ids))
        span.finish_reasons([generation.finish_reason])
        span.weight_versions(generation.spans)
        if span.recording and token2text():
            await self._show_text(span, request.token_ids[request.context_start :], generation.token_ids)

    async def _show_text(self, span: SpanHandle, prompt: list[int], output: list[int]) -> None:
        try:
            span.inputs({"prompt_text": await self._text.decode(prompt)})
            span.outputs({"response_text": await self._text.decode(output)})
        except Exception as error:
            # A model folder without a tokenizer must not cost the trajectory its tokens.
            span.event("text_unavailable", reason=f"{type(error).__name__}: {error}")
            if not self._text_failed:
                _log.warning("traces carry no text: the tokenizer does not load: %s", error)
            self._text_failed = True

    def _reply(self, request_id: str, request: GenerateRequest, generation: Generation) -> GenerateReply:
        prompt, completion = len(request.token_ids), len(generation.token_ids)
        pairs = zip(generation.token_ids, generation.logprobs, strict=True)
        choice = GenerateChoice(
            finish_reason=generation.finish_reason,
            token_ids=generation.token_ids,
            logprobs=ChoiceLogprobs(content=[TokenLogprob(token_id=token, logprob=lp) for token, lp in pairs]),
            weight_versions=generation.spans,
        )
        return GenerateReply(
            request_id=request_id,
            model=self._model,
            created=int(time.time()),
            usage=Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion),
            choices=[choice],
        )
