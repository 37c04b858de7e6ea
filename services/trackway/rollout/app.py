"""The rollout service over HTTP. Routes only. The logic is in service.py."""

import hashlib
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Body, Depends, FastAPI, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import JsonValue

from trackway.clients.weights import WeightStore
from trackway.rollout.classifiers import is_classifier
from trackway.rollout.engines import beside, open_engine
from trackway.rollout.engines.protocol import Engine, MemoryPart, PauseMode
from trackway.rollout.metrics import InferenceMetrics, engine_gauges, store_gauges
from trackway.rollout.model_routes import classifier_app, model_routes
from trackway.rollout.policies import Policies
from trackway.rollout.service import RolloutService, TokenText
from trackway.rollout.settings import RolloutSettings
from trackway.rollout.weight_watcher import WeightWatcher
from trackway.serving import ServiceRouter, needs_admin, service_app
from trackway.serving.middleware import NdjsonStream, run_batch, unforeseen
from trackway.tracing import Tracing, collect_trace_stats
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import (
    AbortReply,
    AbortRequest,
    EngineLoad,
    GeneratePiece,
    GenerateReply,
    GenerateRequest,
    ModelList,
    PausedReply,
    PauseReply,
    PauseRequest,
    PolicyList,
    SleepMode,
    SleepReply,
    WeightInfo,
    WeightsReply,
)
from trackway.wire.service import BatchRequest

_log = logging.getLogger(__name__)


async def piece_lines(policies: Policies, request: GenerateRequest) -> AsyncGenerator[str]:
    """A line for each GeneratePiece. The last has the receipt, and the error of a generation that failed."""
    last = GeneratePiece()
    with collect_trace_stats() as stats:
        try:
            async with aclosing(policies.stream(request)) as pieces:
                async for piece in pieces:
                    yield _line(
                        GeneratePiece(
                            token_ids=piece.token_ids,
                            logprobs=piece.logprobs,
                            top_logprobs=[*piece.top_logprobs],
                            prompt_logprobs=piece.prompt_logprobs,
                            version=piece.version,
                            weight_versions=[*piece.weight_versions],
                            finish_reason=piece.finish_reason,
                        )
                    )
        except TrackwayError as error:
            last.error = error.to_reply().error
        except Exception as error:
            _log.exception("a streamed generation failed")
            last.error = unforeseen(error).to_reply().error
        last.receipt = stats.receipt()
    yield _line(last)


def _line(piece: GeneratePiece) -> str:
    return piece.model_dump_json(exclude_defaults=True) + "\n"


ANSWER_S = 0.5
"""Time left before the caller's deadline to report why an operation is unfinished."""

Caller = Annotated[str, Query(max_length=64)]
"""Name of a caller that limits its rollouts by the load. Others need none and do not count."""

PROMPT: dict[str, JsonValue] = {
    "token_ids": [1, 64, 17, 9],
    "sampling_params": {"temperature": 1.0, "max_tokens": 32, "seed": 7},
    "min_weight_version": 3,
}


def create_app(
    settings: RolloutSettings | None = None, engine: Engine | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """The rollout service with the given engine, or the one named in the settings. A classifier has its own routes."""
    settings = settings or RolloutSettings()
    if engine is None and is_classifier(settings.model_path):
        return classifier_app(settings, tracing)
    text = TokenText(settings.model_path, settings.tool_parser)
    engine = engine or open_engine(settings)
    store = WeightStore(settings.weights_url) if settings.weights_url else None
    metrics = InferenceMetrics()

    def opened(of_policy: RolloutSettings) -> RolloutService:
        own = WeightStore(of_policy.weights_url) if of_policy.weights_url else None
        return _service(of_policy, open_engine(beside(engine, of_policy)), text, own, metrics)

    default = _service(settings, engine, text, store, metrics)
    policies = Policies(default, settings, store, opened)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await policies.start()
            yield
        finally:
            await policies.stop()

    return service_app(
        "rollout",
        settings,
        routers=[routes(policies), *model_routes(policies, text), control_routes(policies)],
        lifespan=lifespan,
        ready=policies.ready,
        tracing=tracing,
        collectors=[metrics, policies],
        gauges=[
            *engine_gauges(engine, lambda: default.weights().latest),
            *([] if store is None else store_gauges(store)),
        ],
    )


def routes(policies: Policies) -> ServiceRouter:
    """The service's routes, named as in vLLM, so that a plain vLLM can replace it."""
    router = ServiceRouter(tags=["rollout"])

    @router.post("/inference/v1/generate", include_in_schema=False)
    @router.post("/generate")
    async def generate(request: Annotated[GenerateRequest, Body(examples=[PROMPT])]) -> GenerateReply:
        """Continue a prompt given as token ids. After 409 `weights_behind`, 429 `overloaded` or 503 `paused`, retry
        later."""
        return await policies.generate(request)

    @router.post(
        "/generate_batch", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}}
    )
    async def generate_batch(body: BatchRequest[GenerateRequest], request: Request) -> StreamingResponse:
        """Run generations at the same time. Streams one BatchResult per line of NDJSON, each as it ends. Each equals
        the same request to `/generate`, and has its own trace and its own error."""
        return NdjsonStream(run_batch(policies.generate, body.entries, request.app.state.batch_load))

    @router.post(
        "/generate_stream", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}}
    )
    async def generate_stream(request: Annotated[GenerateRequest, Body(examples=[PROMPT])]) -> StreamingResponse:
        """Stream `/generate`, a GeneratePiece per line of NDJSON as the tokens come. An error is a line too.
        Closing the connection aborts the generation."""
        return NdjsonStream(piece_lines(policies, request))

    @router.get("/weights")
    async def weights(model: str | None = None) -> WeightsReply:
        """The weight version of a policy that the replica has loaded, and the newest that it has seen."""
        return policies.held(model).weights()

    @router.get("/load")
    async def load(caller: Caller = "") -> EngineLoad:
        """The engine's requests and KV cache, and how many callers have asked for them in the last 30 seconds."""
        return await policies.load(caller)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The default policy and those with published weights. Requests can name `base` too, the model without any."""
        return await policies.models()

    @router.get("/policies")
    async def list_policies() -> PolicyList:
        """Every policy that a request can name, and which of them the replica that answers has loaded."""
        return await policies.policies()

    return router


def control_routes(policies: Policies) -> ServiceRouter:
    """The routes by which a trainer controls an engine. They need an operator's token.

    `model` names a policy that the replica has loaded. Without it they act on the default one.
    """
    router = ServiceRouter(tags=["control"])
    operator = [Depends(needs_admin)]

    @router.post("/pause", dependencies=operator)
    async def pause(
        request: PauseRequest | None = None, mode: PauseMode | None = None, model: str | None = None
    ) -> PauseReply:
        """Refuse new requests (503 `paused`). Returns when those in flight have finished, are
        aborted, or are frozen."""
        return await policies.held(model).pause(mode or (request or PauseRequest()).mode)

    @router.post("/resume", dependencies=operator)
    async def resume(model: str | None = None) -> PauseReply:
        """Accept requests again; frozen ones continue with their KV cache."""
        return await policies.held(model).resume()

    @router.get("/is_paused")
    async def is_paused(model: str | None = None) -> PausedReply:
        """Return whether new requests are refused."""
        return policies.held(model).is_paused()

    @router.post("/inference/v1/abort_requests", include_in_schema=False, dependencies=operator)
    @router.post("/abort_requests", dependencies=operator)
    async def abort(request: AbortRequest | None = None, model: str | None = None) -> AbortReply:
        """Abort generations by request id, or all. Each returns its tokens so far with finish_reason `abort`."""
        return await policies.held(model).abort(request.request_ids if request else None)

    @router.get("/weight_info")
    async def weight_info(model: str | None = None) -> WeightInfo:
        """The replica's weight version."""
        return policies.held(model).weight_info()

    @router.post("/sleep", dependencies=operator)
    async def sleep(
        mode: SleepMode = "wait",
        tags: Annotated[list[MemoryPart] | None, Query()] = None,
        model: str | None = None,
    ) -> SleepReply:
        """Pause, then release GPU memory (all of it, or the parts in `tags`). Needs an engine with sleep mode. With
        `retract`, requests wait for the wake-up, and those in flight keep their tokens."""
        return await policies.held(model).sleep(mode, tags)

    @router.post("/wake_up", dependencies=operator)
    async def wake_up(
        tags: Annotated[list[MemoryPart] | None, Query()] = None,
        min_weight_version: Annotated[int, Query(ge=0)] = 0,
        x_request_timeout: Annotated[float | None, Header()] = None,
        model: str | None = None,
    ) -> SleepReply:
        """Allocate the memory again, in stages by `tags`. Generation continues when all of it is back.

        With `min_weight_version` it returns when such weights are loaded, or 409 `weights_behind` before the deadline.
        """
        left = None if x_request_timeout is None else max(0.0, x_request_timeout - ANSWER_S)
        return await policies.held(model).wake_up(tags, min_weight_version, left)

    @router.get("/is_sleeping")
    async def is_sleeping(model: str | None = None) -> SleepReply:
        """Return which parts of the memory are released, and whether the engine can release any."""
        return policies.held(model).sleeping()

    return router


def _service(
    settings: RolloutSettings, engine: Engine, text: TokenText, store: WeightStore | None, metrics: InferenceMetrics
) -> RolloutService:
    cache = settings.weights_cache or _shared_cache(settings.weights_url or "")
    watcher = WeightWatcher(
        engine, store, cache, settings.watch_interval_s, settings.weight_wait_s, settings.update_mode
    )
    return RolloutService(engine, watcher, text, settings, metrics)


def _shared_cache(weights_url: str) -> Path:
    """The cache of this user's replicas on this host that follow the store."""
    name = hashlib.sha256(weights_url.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"trackway-weights-{os.getuid()}-{name}"
