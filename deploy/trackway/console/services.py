"""The running services behind the console: how they are, and single requests to try them.

The console holds no token for them. It passes on the one that the caller's browser sent, to the addresses that it was
started with and to no other, and on the routes named here only.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import httpx
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, JsonValue, SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.clients.base import replicas_of
from trackway.console.replies import ReplicaState, ServiceState, SystemPage, TryAnswer, TryOffer
from trackway.serving.auth import presented_key
from trackway.wire.base import Float, Int, WireRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatCompletion, ChatMessage, ChatRequest
from trackway.wire.reward import ScoreRequest, ScorerList
from trackway.wire.rollout import ModelList
from trackway.wire.service import ReplicaInfo
from trackway.wire.tools import OneShotRequest, OneShotResult, ToolList
from trackway.wire.trajectory import Reward

ASK_S = 5.0
"""Longest wait for a service's answer about itself."""
QUEUE_S = 1.0
"""Longest wait for a replica's own address, which may be closed to this machine."""
TRY_S = 120.0
"""Longest wait for a generation, a tool call or a score."""
MOST_CHARS = 100_000
QUEUES = (
    "trackway_in_flight",
    "trackway_engine_running",
    "trackway_engine_waiting",
    "trackway_trajectories_running",
    "trackway_trajectories_limit",
    "trackway_tool_instances",
)
"""Gauges of `/metrics` that are shown."""
_SAMPLE = re.compile(rf"^({'|'.join(QUEUES)}) ([0-9.eE+-]+)$", re.MULTILINE)
_REFUSALS = (ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN)
M = TypeVar("M", bound=BaseModel)


class TryPrompt(WireRequest):
    """A prompt for the rollout service's model."""

    prompt: str = Field(min_length=1, max_length=MOST_CHARS)
    max_tokens: Int = Field(default=256, ge=1, le=8192)
    temperature: Float = Field(default=1.0, ge=0.0, le=10.0)


class TryTool(WireRequest):
    """A call of a tool, in an instance of its own."""

    tool: Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,128}$")]
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


def service_routes(urls: Mapping[str, str], http: httpx.AsyncClient | None = None) -> APIRouter:
    """The routes over services at these addresses, by name. Without addresses there is nothing to try."""
    router = APIRouter(tags=["services"], generate_unique_id_function=lambda route: route.name)

    def client(service: str, request: Request, total_s: float) -> ServiceClient:
        if service not in urls:
            known = ", ".join(urls) or "none"
            message = (
                f"expected a service that this console knows ({known}), got {service}; start it with --services-url"
            )
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        token = SecretStr(presented_key(request.headers.raw) or "")
        return ServiceClient(urls[service], http, policy=CallPolicy.question(total_s), token=token)

    @router.get("/api/system", response_model=SystemPage)
    async def system(request: Request) -> SystemPage:
        """Each service with its replicas, weights, queues and spans. 401 when they refuse the caller's token."""
        asked = [_state(name, url, client(name, request, ASK_S)) for name, url in urls.items()]
        return SystemPage(services=await asyncio.gather(*asked))

    @router.get("/api/try", response_model=TryOffer)
    async def offer(request: Request) -> TryOffer:
        """The model, the tools and the scorers of the services that answer."""

        async def ask(service: str, path: str, reply: type[M]) -> M | None:
            """None for a service that is not known or does not answer. Raises TrackwayError for a refusal."""
            if service not in urls:
                return None
            try:
                return await client(service, request, ASK_S).call("GET", path, reply=reply)
            except TrackwayError as error:
                if error.code in _REFUSALS:
                    raise
                return None

        models, tools, scorers = await asyncio.gather(
            ask("rollout", "/v1/models", ModelList),
            ask("tools", "/tools", ToolList),
            ask("reward", "/scorers", ScorerList),
        )
        return TryOffer(
            model=models.data[0].id if models and models.data else None,
            tools=tools.tools if tools else [],
            scorers=scorers.scorers if scorers else [],
        )

    @router.post("/api/try/prompt", response_model=TryAnswer)
    async def try_prompt(request: Request, body: TryPrompt) -> TryAnswer:
        """The model's answer to one user message."""
        rollout = client("rollout", request, TRY_S)
        models = await rollout.call("GET", "/v1/models", reply=ModelList)
        chat = ChatRequest(
            model=models.data[0].id,
            messages=[ChatMessage(role="user", content=body.prompt)],
            max_tokens=body.max_tokens,
            temperature=body.temperature,
        )
        answer = await rollout.call("POST", "/v1/chat/completions", reply=ChatCompletion, body=chat)
        [choice] = answer.choices
        calls = [f"{call.function.name}({call.function.arguments})" for call in choice.message.tool_calls or []]
        return TryAnswer(
            text="\n".join([choice.message.content or "", *calls]).strip(),
            facts={
                "model": answer.model,
                "ended by": choice.finish_reason or "",
                "tokens": answer.usage.completion_tokens if answer.usage else None,
            },
        )

    @router.post("/api/try/tool", response_model=TryAnswer)
    async def try_tool(request: Request, body: TryTool) -> TryAnswer:
        """The result of one call."""
        tools = client("tools", request, TRY_S)
        call = OneShotRequest(arguments=body.arguments, create_kwargs=body.create_kwargs)
        result = await tools.call("POST", f"/tools/{body.tool}/execute", reply=OneShotResult, body=call)
        return TryAnswer(
            text=result.text,
            facts={"reward": result.reward, "instance's reward": result.instance_reward, **result.metrics},
        )

    @router.post("/api/try/score", response_model=TryAnswer)
    async def try_score(request: Request, body: ScoreRequest) -> TryAnswer:
        """The score of one solution."""
        reward = client("reward", request, TRY_S)
        scored = await reward.call("POST", "/score", reply=Reward, body=body)
        return TryAnswer(text=f"{scored.score:g}", facts={**scored.components})

    return router


async def _state(name: str, url: str, client: ServiceClient) -> ServiceState:
    try:
        found = await replicas_of(client)
    except TrackwayError as error:
        if error.code in _REFUSALS:
            raise
        return ServiceState(service=name, url=url, answers=False, message=error.message, replicas=[])
    asked = [_queues(client, replica, found.passes.get(replica.health.replica)) for replica in found.replicas]
    queues = await asyncio.gather(*asked)
    replicas = [_replica(info, values) for info, values in zip(found.replicas, queues, strict=True)]
    return ServiceState(service=name, url=url, answers=True, message="", replicas=replicas)


async def _queues(client: ServiceClient, replica: ReplicaInfo, token: str | None) -> dict[str, float]:
    """Gauges of one replica by its own address, or of a service alone. Empty where that cannot be reached."""
    at_replica = client
    if replica.url is not None:
        at_replica = ServiceClient(
            replica.url, client.http, policy=CallPolicy.question(QUEUE_S), token=SecretStr(token or "")
        )
    try:
        text = (await at_replica.send("GET", "/metrics")).text
    except TrackwayError:
        return {}
    queues = {name.removeprefix("trackway_"): float(value) for name, value in _SAMPLE.findall(text)}
    if "in_flight" in queues:  # without this question
        queues["in_flight"] = max(0.0, queues["in_flight"] - 1)
    return queues


def _replica(info: ReplicaInfo, queues: dict[str, float]) -> ReplicaState:
    health, spans = info.health, info.health.spans
    return ReplicaState(
        replica=health.replica,
        pid=health.pid,
        ready=info.ready.ready,
        reason=info.ready.reason,
        version=info.weights.version if info.weights else None,
        latest=info.weights.latest if info.weights else None,
        verdict=info.weights.verdict.value if info.weights and info.weights.verdict else "",
        trace_backends=health.trace_backends,
        spans_ended=spans.ended,
        spans_waiting=spans.waiting,
        spans_lost=spans.dropped + spans.refused,
        threads=health.threads,
        code=health.code.digest if health.code else "",
        queues=queues,
    )
