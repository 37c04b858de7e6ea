"""The tool server's routes. Routes only. The logic is in server.py and get_observation.py.

Errors: 4xx is the caller's (the agent shows a 422 to the model), 5xx is the server's or the tool's.
"""

from typing import Annotated

from fastapi import Body, Depends, Path, Query, Request, Response
from pydantic import JsonValue, ValidationError
from pydantic_core import to_json

from trackway.serving import ServiceRouter, needs_admin
from trackway.serving.auth import CALLER
from trackway.tools.builtin.search.tool import SearchTool
from trackway.tools.core.server import ToolServer
from trackway.tools.core.sessions import SessionKey
from trackway.tools.nemo_gym import COOKIE, NemoGymFace
from trackway.tools.verl.get_observation import ObservationFace
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
