"""The reward service over HTTP. Routes only. The logic is in scorers.py."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Body, FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import JsonValue

from trackway.reward.scorers import RewardService, Scorer, scorers_of
from trackway.reward.settings import RewardSettings
from trackway.serving import ServiceRouter, service_app
from trackway.serving.middleware import NdjsonStream, run_batch
from trackway.tracing import Tracing
from trackway.wire.reward import ScoreRequest, ScorerList
from trackway.wire.service import BatchRequest
from trackway.wire.trajectory import Reward

ONE: dict[str, JsonValue] = {
    "data_source": "openai/gsm8k",
    "solution_str": "48 / 2 = 24 clips in May, 48 + 24 = 72 in all.\n#### 72",
    "ground_truth": "72",
}
SCORER: dict[str, JsonValue] = {
    "name": "gsm8k",
    "data_sources": ["openai/gsm8k", "trackway/tiny_math"],
    "methods": ["strict", "flexible", "normalized"],
    "description": "1.0 when the final answer equals the ground truth, else 0.0.",
}
REWARD: dict[str, JsonValue] = {"score": 1.0, "components": {"correct": 1.0, "answered": 1.0}}


def create_app(
    settings: RewardSettings | None = None,
    scorers: Sequence[Scorer] | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The reward service with the given scorers, or the built-in ones and those named in the settings."""
    settings = settings or RewardSettings()
    if scorers is None:
        scorers = scorers_of(settings)
    service = RewardService(scorers, settings.score_timeout_s)
    return service_app("reward", settings, routers=[routes(service)], tracing=tracing)


def routes(service: RewardService) -> ServiceRouter:
    """The routes of the service."""
    router = ServiceRouter(tags=["reward"])

    @router.post("/score", responses=_answer(REWARD))
    async def score(request: Annotated[ScoreRequest, Body(examples=[ONE])]) -> Reward:
        """Score one solution. 422 `unknown_data_source`, or `invalid_request` for a method, names the valid ones."""
        return await service.score(request)

    @router.post(
        "/score_batch", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}}
    )
    async def score_each(body: BatchRequest[ScoreRequest], request: Request) -> StreamingResponse:
        """Score solutions at the same time. Streams one BatchResult per line of NDJSON, each as it ends. Each equals
        the same request to `/score`, and has its own trace and its own error."""
        return NdjsonStream(run_batch(service.score, body.entries, request.app.state.batch_load))

    @router.get("/scorers", responses=_answer({"scorers": [SCORER]}))
    async def scorers() -> ScorerList:
        """The scorers with their data sources and methods. The first method is the default."""
        return ScorerList(scorers=service.infos())

    return router


def _answer(example: JsonValue) -> dict[int | str, dict[str, object]]:
    return {200: {"content": {"application/json": {"example": example}}}}
