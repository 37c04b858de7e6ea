"""The rollout service over HTTP. Routes only: the work is in service.py."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, FastAPI
from pydantic import JsonValue

from trackway.clients.weights import WeightStore
from trackway.rollout.engine import Engine
from trackway.rollout.service import RolloutService
from trackway.rollout.settings import RolloutSettings
from trackway.rollout.text import TokenText
from trackway.rollout.weights import WeightWatcher
from trackway.serving import service_app
from trackway.tracing import Tracing
from trackway.wire.rollout import (
    GenerateReply,
    GenerateRequest,
    ModelList,
    PauseReply,
    PauseRequest,
    WeightsReply,
)

PROMPT: dict[str, JsonValue] = {
    "token_ids": [1, 64, 17, 9],
    "sampling_params": {"temperature": 1.0, "max_tokens": 32, "seed": 7},
    "min_weight_version": 3,
}


def create_app(
    settings: RolloutSettings | None = None, engine: Engine | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """The rollout service on the engine given, or the one that the settings name."""
    settings = settings or RolloutSettings()
    service = _service(settings, engine or _engine(settings))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
            yield
        finally:
            await service.stop()

    return service_app(
        "rollout", settings, routers=[routes(service)], lifespan=lifespan, ready=service.ready, tracing=tracing
    )


def routes(service: RolloutService) -> APIRouter:
    """The service's routes; names follow vLLM's, so that a plain vLLM can stand in for it."""
    router = APIRouter(tags=["rollout"])

    @router.post("/inference/v1/generate", include_in_schema=False)
    @router.post("/generate")
    async def generate(request: Annotated[GenerateRequest, Body(examples=[PROMPT])]) -> GenerateReply:
        """Continue a prompt given as token ids. 409 weights_behind, 429 overloaded and 503 paused: ask again later."""
        return await service.generate(request)

    @router.get("/weights")
    async def weights() -> WeightsReply:
        """The weight version of the replica that answers, and the newest it has seen."""
        return service.weights()

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The served model."""
        return service.models()

    @router.post("/pause")
    async def pause(request: PauseRequest | None = None) -> PauseReply:
        """Refuse new requests (503 paused); answers when those in flight have finished, are cut, or are frozen."""
        return await service.pause(request or PauseRequest())

    @router.post("/resume")
    async def resume() -> PauseReply:
        """Take requests again; frozen ones go on with their KV cache."""
        return await service.resume()

    return router


def _service(settings: RolloutSettings, engine: Engine) -> RolloutService:
    store = WeightStore(settings.weights_url) if settings.weights_url else None
    cache = settings.weights_cache or Path(tempfile.gettempdir()) / f"trackway-weights-{settings.replica}"
    watcher = WeightWatcher(engine, store, cache, settings.watch_interval_s, settings.weight_wait_s)
    text, name, replica = TokenText(settings.model_path), settings.model_name, settings.replica
    return RolloutService(engine, watcher, text, name, replica, settings.weights_late_s)


def _engine(settings: RolloutSettings) -> Engine:
    # Torch takes seconds to import; a service over another engine does without.
    from trackway.rollout.torch_engine import TorchEngine

    return TorchEngine(settings)
