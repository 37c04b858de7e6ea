"""The tool server's routes. Routes only. The logic is in server.py and get_observation.py.

Errors: 4xx is the caller's (the agent shows a 422 to the model), 5xx is the server's or the tool's.
"""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Body, Depends, Path, Query, Request, Response
from pydantic import JsonValue, ValidationError
from pydantic_core import to_json

from trackway.serving import ServiceRouter, needs_admin
from trackway.serving.auth import CALLER
from trackway.serving.error_responses import documented_error
from trackway.tools.builtin.search.tool import SearchTool
from trackway.tools.core.server import ToolServer
from trackway.tools.core.sessions import SessionKey
from trackway.tools.nemo_gym import COOKIE, NemoGymFace
from trackway.tools.verl.get_observation import ObservationFace
from trackway.wire.agent import GymVerify
from trackway.wire.base import NON_FINITE
from trackway.wire.errors import ERRORS, ErrorCode, ModelSees, TrackwayError
from trackway.wire.search import RetrieveReply, RetrieveRequest
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
    RewardRequest,
    SessionReleased,
    ToolList,
    ToolResult,
    ToolReward,
)

Responses = dict[int | str, dict[str, Any]]

EVERYWHERE = (ErrorCode.UNAUTHORIZED, ErrorCode.INVALID_REQUEST, ErrorCode.INTERNAL)
POSTED = (*EVERYWHERE, ErrorCode.CONFLICT, ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.DEADLINE_EXCEEDED)
_RUNS_TOOL = (ErrorCode.OVERLOADED, ErrorCode.TOOL_FAILED, ErrorCode.TOOL_TIMEOUT, ErrorCode.UNAVAILABLE)
CREATES = (*POSTED, ErrorCode.UNKNOWN_TOOL, *_RUNS_TOOL)
CALLS = (*POSTED, ErrorCode.INSTANCE_NOT_FOUND, ErrorCode.INSTANCE_LOST, *_RUNS_TOOL)

_ID = "81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f"
_MESSAGES: dict[ErrorCode, str] = {
    ErrorCode.INVALID_REQUEST: (
        "calculator: missing argument: 'expression' is a required property; expected arguments: expression"
    ),
    ErrorCode.UNAUTHORIZED: "expected a bearer token that this service knows; send `Authorization: Bearer <token>`",
    ErrorCode.FORBIDDEN: (
        "expected a token with the scope 'admin', got 'agents' with 'execute'; use an operator's token"
    ),
    ErrorCode.UNKNOWN_TOOL: (
        "expected one of the tools calc_gsm8k_reward, calculator, got 'abacus'; "
        "GET /tools lists them with their schemas"
    ),
    ErrorCode.INSTANCE_NOT_FOUND: (
        f"expected a living instance, got 'replica0-{_ID}': never made here, released, or idle for more than 3600 s; "
        "POST /instances makes a new one"
    ),
    ErrorCode.INSTANCE_LOST: (
        f"expected an instance of replica replica1-0c3f52d1, got replica0-{_ID}, made by another replica; "
        "send x-session-id with every call, or create the instance again and replay its calls"
    ),
    ErrorCode.CONFLICT: "idempotency-key 'a1' was used with another body; take a new key",
    ErrorCode.PAYLOAD_TOO_LARGE: "expected a body of at most 16777216 bytes, got 20000000 or more; send less at once",
    ErrorCode.OVERLOADED: "tool 'python': expected a free place within 60 s; ask again later, or add replicas",
    ErrorCode.TOOL_FAILED: "tool 'python' failed in execute: OSError: No space left on device",
    ErrorCode.UNAVAILABLE: "search: the retriever http://127.0.0.1:8000/retrieve did not answer",
    ErrorCode.INTERNAL: "KeyError: 'x'; this is a bug; see the traceback in the service's log",
    ErrorCode.DEADLINE_EXCEEDED: ("the caller's deadline 1763800000.000 passed during the request; allow more time"),
    ErrorCode.TOOL_TIMEOUT: (
        "tool 'python': expected execute to end within 30 s; ask for less at once, or raise call_timeout_s"
    ),
}


def responses(status: int, example: JsonValue, *codes: ErrorCode, links: tuple[str, ...] = ()) -> Responses:
    """A response with its example, and the errors of these codes. `links` name operations that take its instance."""
    answer: dict[str, Any] = {} if status == HTTPStatus.NO_CONTENT else _json({"example": example})
    if links:
        answer["links"] = {name: _link(name) for name in links}
    documented: Responses = {status: answer}
    for code in sorted(codes, key=lambda code: ERRORS[code].status):
        _add(documented, code)
    return documented


def _add(documented: Responses, code: ErrorCode) -> None:
    error = TrackwayError(code, _MESSAGES[code])
    entry = documented.setdefault(error.status, documented_error(""))
    entry["description"] = ", ".join(filter(None, (entry["description"], f"`{code.value}`")))
    examples = entry["content"]["application/json"].setdefault("examples", {})
    examples[code.value] = {"value": error.to_reply().model_dump(mode="json")}
    if code is ErrorCode.OVERLOADED:
        entry["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}


def _json(content: dict[str, JsonValue]) -> dict[str, Any]:
    return {"content": {"application/json": content}}


def _link(operation: str) -> dict[str, JsonValue]:
    return {"operationId": operation, "parameters": {"path.instance_id": "$response.body#/instance_id"}}


CREATE: dict[str, JsonValue] = {
    "tool": "calc_gsm8k_reward",
    "session_id": "gsm8k-demo/1/17/0",
    "create_kwargs": {"ground_truth": "72"},
}
EXECUTE: dict[str, JsonValue] = {"arguments": {"answer": "72"}, "tool_call_id": "call_0"}
ONE_SHOT: dict[str, JsonValue] = {"arguments": {"expression": "(84 + 16) / 4"}}

CREATED: JsonValue = {
    "instance_id": "replica0-81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f",
    "tool": "calc_gsm8k_reward",
}
EXECUTED: JsonValue = {"text": "Current parsed answer='72' reward=1.0", "reward": 0.0, "metrics": {}}
CALCULATED: JsonValue = {"text": "25", "reward": 0.0, "metrics": {}, "instance_reward": 0.0}
REWARD: JsonValue = {"reward": 1.0}
INSTANCES: JsonValue = {
    "instances": [
        {
            "instance_id": "replica0-81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f",
            "tool": "calc_gsm8k_reward",
            "session_id": "gsm8k-demo/1/17/0",
            "state": "idle",
            "age_s": 12.5,
            "idle_s": 3.25,
        }
    ],
    "total": 1,
}
SESSION_RELEASED: JsonValue = {"released": 2, "failed": []}

RETRIEVE: dict[str, JsonValue] = {"queries": ["capital of France"], "topk": 3, "return_scores": True}
RETRIEVED: JsonValue = {
    "result": [
        [{"document": {"id": "paris.md#0", "contents": '"Paris"\nParis is the capital of France.'}, "score": 1.42}]
    ]
}

OBSERVE: dict[str, JsonValue] = {
    "trajectory_ids": ["t-1", "t-2"],
    "actions": [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "(84 + 16) / 4"}}</tool_call>',
        "no call",
    ],
    "extra_fields": [{}, {}],
    "finish": [False, True],
}
OBSERVED: JsonValue = {
    "observations": ["\n<tool_response>\n25\n</tool_response>\n", ""],
    "dones": [False, True],
    "valids": [True, True],
    "processing_time_ms": 0.4,
}
TOOLS: JsonValue = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluate an arithmetic expression and return its value.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "Numbers and operators"}},
                    "required": ["expression"],
                },
            },
        }
    ],
    "stateless": ["calculator"],
}


Name = Annotated[str, Path(pattern="^[A-Za-z0-9._-]{1,128}$")]
Session = Annotated[str, Path(min_length=1, max_length=MAX_SESSION_CHARS, examples=["gsm8k-demo/1/17/0"])]

_TAKES_INSTANCE = ("execute_instance", "reward_instance", "release_instance")


def tool_routes(server: ToolServer) -> ServiceRouter:
    """The list of tools, and calls without an instance."""
    router = ServiceRouter(tags=["tools"], generate_unique_id_function=lambda route: route.name)

    @router.get("/tools", responses=responses(200, TOOLS, *EVERYWHERE))
    async def list_tools() -> ToolList:
        """All tools as OpenAI function schemas, ready for a chat request's `tools`."""
        return ToolList(tools=server.schemas(), stateless=server.stateless())

    @router.post("/tools/{name}/execute", responses=responses(200, CALCULATED, *CREATES))
    async def execute_tool(name: Name, request: Annotated[OneShotRequest, Body(examples=[ONE_SHOT])]) -> OneShotResult:
        """Create, execute, reward and release in one request, for stateless tools."""
        return await server.one_shot(name, request)

    return router


def instance_routes(server: ToolServer) -> ServiceRouter:
    """The instance routes."""
    router = ServiceRouter(tags=["instances"], generate_unique_id_function=lambda route: route.name)

    @router.post(
        "/instances",
        status_code=201,
        responses=responses(201, CREATED, *CREATES, links=_TAKES_INSTANCE),
    )
    async def create_instance(request: Annotated[CreateInstance, Body(examples=[CREATE])]) -> InstanceCreated:
        """Create a tool's state for a trajectory. Send the same `x-session-id` with every call."""
        return await server.create(request)

    @router.post("/instances/{instance_id}/execute", responses=responses(200, EXECUTED, *CALLS))
    async def execute_instance(
        instance_id: Name, request: Annotated[ExecuteRequest, Body(examples=[EXECUTE])]
    ) -> ToolResult:
        """Run a call. Calls of an instance run one after another. With an `Idempotency-Key` it never runs twice."""
        return await server.execute(instance_id, request)

    @router.post("/instances/{instance_id}/reward", responses=responses(200, REWARD, *CALLS))
    async def reward_instance(
        instance_id: Name, request: Annotated[RewardRequest | None, Body(examples=[{}])] = None
    ) -> ToolReward:
        """The reward of an instance over all its calls."""
        kwargs = request.calc_reward_kwargs if request else {}
        return ToolReward(reward=await server.reward(instance_id, kwargs))

    @router.delete("/instances/{instance_id}", status_code=204, responses=responses(204, None, *CALLS))
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
    errors = (*EVERYWHERE, ErrorCode.FORBIDDEN)

    @router.get("/instances", responses=responses(200, INSTANCES, *errors))
    async def list_instances(
        session_id: Annotated[str | None, Query(max_length=MAX_SESSION_CHARS)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> InstanceList:
        """The instances of this replica, oldest first, without their content."""
        return server.instances(session_id, limit)

    @router.delete("/sessions/{session_id:path}", responses=responses(200, SESSION_RELEASED, *errors))
    async def release_session(session_id: Session) -> SessionReleased:
        """Release every instance of a trajectory on this replica, each after its current call."""
        return await server.release_session(session_id)

    return router


def observation_routes(face: ObservationFace) -> ServiceRouter:
    """verl-tool's protocol."""
    router = ServiceRouter(tags=["verl-tool"], generate_unique_id_function=lambda route: route.name)

    @router.post(
        "/get_observation",
        responses=responses(200, OBSERVED, *POSTED),
        response_model_exclude_none=True,
    )
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

    @router.post("/seed_session", responses=responses(200, {}, *POSTED))
    async def seed_session(http: Request, row: dict[str, JsonValue]) -> Response:
        """Begin a session for a row."""
        return answer("{}", face.seed(http.scope[CALLER].name, row), media_type="application/json")

    @router.post("/verify", responses=responses(200, {"reward": 1.0}, *POSTED))
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

    @router.post("/{name}", responses=responses(200, None, *CALLS))
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

    @router.post("/retrieve", responses=responses(200, RETRIEVED, *POSTED))
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
