"""The REST API of the tool server: thin routes, and a fast path for the two that execute a tool.

Errors: 4xx is the caller's (the agent shows a 422 to the model), 5xx is the server's or the tool's.

The fast path goes without FastAPI, whose overhead is several times the work of a small tool. It answers only ordinary
requests, with the same errors. Others (another route, another content type, no body) are passed to FastAPI, whose
routes are the documented ones.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Body, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import to_json
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.serving import ServiceRouter, needs_admin
from trackway.serving.auth import CALLER
from trackway.serving.limits import again
from trackway.serving.routes import body_problems, misfit
from trackway.tools.builtin.search import SearchTool
from trackway.tools.core.server import SessionKey, ToolServer
from trackway.tools.get_observation import ObservationFace
from trackway.tools.nemo_gym import COOKIE, NemoGymFace
from trackway.wire.agent import GymVerify
from trackway.wire.base import NON_FINITE
from trackway.wire.errors import ErrorCode, ModelSees, TrackwayError
from trackway.wire.tools import (
    MAX_SESSION_CHARS,
    CreateInstance,
    ExecuteRequest,
    InstanceCreated,
    InstanceList,
    ObservationReply,
    ObservationRequest,
    OneShotRequest,
    OneShotResult,
    ReleaseRequest,
    RetrieveReply,
    RetrieveRequest,
    RewardRequest,
    SessionReleased,
    ToolList,
    ToolResult,
    ToolReward,
)

CREATE: dict[str, JsonValue] = {
    "tool": "calc_gsm8k_reward",
    "session_id": "gsm8k-demo/1/17/0",
    "create_kwargs": {"ground_truth": "72"},
}
EXECUTE: dict[str, JsonValue] = {"arguments": {"answer": "72"}, "tool_call_id": "call_0"}
ONE_SHOT: dict[str, JsonValue] = {"arguments": {"expression": "(84 + 16) / 4"}}
RETRIEVE: dict[str, JsonValue] = {"queries": ["capital of France"], "topk": 3, "return_scores": True}
OBSERVE: dict[str, JsonValue] = {
    "trajectory_ids": ["t-1", "t-2"],
    "actions": [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "(84 + 16) / 4"}}</tool_call>',
        "no call",
    ],
    "extra_fields": [{}, {}],
    "finish": [False, True],
}

Name = Annotated[str, Path(pattern="^[A-Za-z0-9._-]{1,128}$")]
Session = Annotated[str, Path(min_length=1, max_length=MAX_SESSION_CHARS, examples=["gsm8k-demo/1/17/0"])]


def tool_routes(server: ToolServer) -> ServiceRouter:
    """The list of tools, and calls without an instance."""
    router = ServiceRouter(tags=["tools"], generate_unique_id_function=lambda route: route.name)

    @router.get("/tools")
    async def list_tools() -> ToolList:
        """All tools as OpenAI function schemas, ready for a chat request's `tools`."""
        return ToolList(tools=server.schemas(), stateless=server.stateless())

    @router.post("/tools/{name}/execute")
    async def execute_tool(name: Name, request: Annotated[OneShotRequest, Body(examples=[ONE_SHOT])]) -> OneShotResult:
        """Create, execute, reward and release in one request, for stateless tools."""
        return await server.one_shot(name, request)

    return router


def instance_routes(server: ToolServer) -> ServiceRouter:
    """The instance routes."""
    router = ServiceRouter(tags=["instances"], generate_unique_id_function=lambda route: route.name)

    @router.post("/instances", status_code=201)
    async def create_instance(request: Annotated[CreateInstance, Body(examples=[CREATE])]) -> InstanceCreated:
        """Create a tool's state for a trajectory. Send the same `x-session-id` with every call."""
        return await server.create(request)

    @router.post("/instances/{instance_id}/execute")
    async def execute_instance(
        instance_id: Name, request: Annotated[ExecuteRequest, Body(examples=[EXECUTE])]
    ) -> ToolResult:
        """Run a call. Calls of an instance run one after another. With an `Idempotency-Key` it never runs twice."""
        return await server.execute(instance_id, request)

    @router.post("/instances/{instance_id}/reward")
    async def reward_instance(
        instance_id: Name, request: Annotated[RewardRequest | None, Body(examples=[{}])] = None
    ) -> ToolReward:
        """The reward of an instance over all its calls."""
        kwargs = request.calc_reward_kwargs if request else {}
        return ToolReward(reward=await server.reward(instance_id, kwargs))

    @router.delete("/instances/{instance_id}", status_code=204)
    async def release_instance(
        instance_id: Name, request: Annotated[ReleaseRequest | None, Body(examples=[{}])] = None
    ) -> None:
        """Release an instance. A second request is 404."""
        await server.release(instance_id, request.release_kwargs if request else {})

    return router


def operator_routes(server: ToolServer) -> ServiceRouter:
    """Routes that need a token with the scope `admin`."""
    router = ServiceRouter(
        tags=["operators"], dependencies=[Depends(needs_admin)], generate_unique_id_function=lambda route: route.name
    )

    @router.get("/instances")
    async def list_instances(
        session_id: Annotated[str | None, Query(max_length=MAX_SESSION_CHARS)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> InstanceList:
        """The instances of this replica, oldest first, without their content."""
        return server.instances(session_id, limit)

    @router.delete("/sessions/{session_id:path}")
    async def release_session(session_id: Session) -> SessionReleased:
        """Release every instance of a trajectory on this replica, each after its current call."""
        return await server.release_session(session_id)

    return router


def observation_routes(face: ObservationFace) -> ServiceRouter:
    """verl-tool's protocol."""
    router = ServiceRouter(tags=["verl-tool"], generate_unique_id_function=lambda route: route.name)

    @router.post("/get_observation", response_model_exclude_none=True)
    async def get_observation(
        http: Request, request: Annotated[ObservationRequest, Body(examples=[OBSERVE])]
    ) -> ObservationReply:
        """Run the calls in the actions of a batch of trajectories. A failed action fails only its own entry."""
        return await face.answer(request, http.scope[CALLER].name)

    return router


def nemo_gym_routes(face: NemoGymFace) -> ServiceRouter:
    """The protocol of NeMo-Gym's resources servers. A session is a cookie."""
    router = ServiceRouter(tags=["nemo-gym"], generate_unique_id_function=lambda route: route.name)

    def session(http: Request) -> SessionKey:
        if COOKIE not in http.cookies:
            message = f"expected the cookie {COOKIE} of /seed_session, got none; send it with each request"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return http.scope[CALLER].name, http.cookies[COOKIE]

    def answer(content: str | bytes, cookie: str, status: int = 200, media_type: str = "text/plain") -> Response:
        # NeMo-Gym's agents keep the cookies of the last answer only.
        reply = Response(content, status, media_type=media_type)
        reply.set_cookie(COOKIE, cookie, httponly=True)
        return reply

    @router.post("/seed_session")
    async def seed_session(http: Request, row: dict[str, JsonValue]) -> Response:
        """Begin a session for a row."""
        return answer("{}", face.seed(http.scope[CALLER].name, row), media_type="application/json")

    @router.post("/verify")
    async def verify(http: Request, row: dict[str, JsonValue]) -> Response:
        """The request with the reward service's score. The session ends."""
        key = session(http)
        try:
            reward = await face.verify(key, GymVerify.model_validate(row))
        except ValidationError as error:
            message = f"/verify: expected a row with verl's columns and a response, got {error}; add them to the rows"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
        verified = {**row, "reward": reward.score, "reward_components": reward.components}
        return answer(to_json(verified, inf_nan_mode=NON_FINITE), key[-1], media_type="application/json")

    @router.post("/{name}")
    async def call_tool(http: Request, name: Name, arguments: dict[str, JsonValue]) -> Response:
        """Run a call of the session's instance of a tool; the text of its result, or of its error, for the model."""
        key = session(http)
        try:
            return answer(await face.call(key, name, arguments), key[-1])
        except TrackwayError as error:
            if error.model_sees is ModelSees.NO:
                raise
            return answer(error.message, key[-1], error.status)

    return router


def search_routes(tool: SearchTool) -> ServiceRouter:
    """The retriever API of search-agent recipes, over the documents of the tool."""
    router = ServiceRouter(tags=["search"], generate_unique_id_function=lambda route: route.name)

    @router.post("/retrieve")
    async def retrieve(
        request: Annotated[RetrieveRequest, Body(examples=[RETRIEVE])],
    ) -> RetrieveReply:
        """The documents of each query, best first; with scores on request."""
        results = await tool.retrieve(request.queries, request.topk)
        return RetrieveReply(
            result=[
                [scored if request.return_scores else scored.document for scored in documents] for documents in results
            ]
        )

    return router


M = TypeVar("M", bound=BaseModel)

_JSON = (b"content-type", b"application/json")


class FastPathRoute(Generic[M]):
    """A POST route with one name in its path and a model as its body."""

    def __init__(self, path: str, body: type[M], answer: Callable[[str, M], Awaitable[BaseModel]]) -> None:
        self.path = path
        """The documented path, as shown in request metrics."""
        self._pattern = re.compile(re.sub(r"\{\w+\}", "([A-Za-z0-9._-]{1,128})", path))
        self._body = body
        self._answer = answer

    def name_in(self, path: str) -> str | None:
        """The name in a path of this route, or None."""
        match = self._pattern.fullmatch(path)
        return match[1] if match else None

    def parsed(self, message: Message) -> M | None:
        """The body, or None when it is not for this route. Raises INVALID_REQUEST, as FastAPI's route would."""
        body = message.get("body", b"")
        if message["type"] != "http.request" or message.get("more_body", False) or not body:
            return None
        try:
            return self._body.model_validate_json(body)
        except ValidationError as error:
            problems = RequestValidationError(body_problems(error))
            raise TrackwayError(ErrorCode.INVALID_REQUEST, misfit(problems)) from None

    async def answer(self, name: str, request: M, send: Send) -> None:
        """Run the call and send the result as JSON."""
        body = (await self._answer(name, request)).model_dump_json().encode()
        headers = [(b"content-length", b"%d" % len(body)), _JSON]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class FastPathMiddleware:
    """ASGI middleware. Must be the innermost, so that all others apply to its routes too."""

    def __init__(self, app: ASGIApp, routes: Sequence[FastPathRoute]) -> None:
        self.app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _JSON not in scope["headers"]:
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        for route in self._routes:
            if (name := route.name_in(path)) is not None:
                message = await receive()
                if (request := route.parsed(message)) is not None:
                    scope["route"] = route
                    await route.answer(name, request, send)
                    return
                receive = again(message, receive)
                break
        await self.app(scope, receive, send)


def add_fast_path(app: FastAPI, server: ToolServer) -> None:
    """Add the fast path to the app, before it serves."""
    routes = [
        FastPathRoute("/instances/{instance_id}/execute", ExecuteRequest, server.execute),
        FastPathRoute("/tools/{name}/execute", OneShotRequest, server.one_shot),
    ]
    app.user_middleware.append(Middleware(FastPathMiddleware, routes=routes))
