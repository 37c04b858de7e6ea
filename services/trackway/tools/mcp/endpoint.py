"""Our tools at `/mcp`: Model Context Protocol over streamable HTTP, by the official SDK.

State lasts as long as the MCP session (`Mcp-Session-Id`, which the handshake opens). The protocol of 2026 has no
sessions: there the header `x-session-id` names one, and without it calls are independent. A call's `_meta` may have
`trackway/create_kwargs`; its result's has the step reward and metrics (results.py).

Responses are plain JSON and there is no event stream: the tools send no notifications, and an open stream would delay
the server's shutdown.
"""

from contextlib import AbstractAsyncContextManager
from importlib.metadata import version

from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import JsonValue, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from trackway.serving.auth import CALLER
from trackway.tools.core.server import ToolServer
from trackway.tools.core.sessions import SessionInstances, SessionKey
from trackway.tools.mcp.results import RequestMeta, ResultMeta, to_mcp, to_mcp_error
from trackway.tools.user_files import problems_of
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.headers import SESSION_ID
from trackway.wire.tools import ExecuteRequest, OneShotRequest, ToolResult

Context = ServerRequestContext[dict[str, JsonValue], Request]

MCP_SESSION_ID = "mcp-session-id"


class McpFace:
    """The MCP endpoint of a tool server; `running` spans its lifetime, `route` is its route."""

    def __init__(self, server: ToolServer, idle_s: float, max_sessions: int, max_body_bytes: int) -> None:
        self._server = server
        self._max_sessions = max_sessions
        self.sessions = SessionInstances(server)
        mcp: Server[dict[str, JsonValue]] = Server(
            "trackway-tools",
            version=version("trackway"),
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            get_tool_input_schema=lambda name: {tool.name: tool.input_schema for tool in self._tools()}.get(name),
        )
        self._manager = StreamableHTTPSessionManager(
            mcp,
            json_response=True,
            session_idle_timeout=idle_s,
            max_request_body_size=max_body_bytes,
            max_sessions=max_sessions,
        )
        self.route = Route("/mcp", self, methods=["POST", "DELETE"], include_in_schema=False)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the session manager; once."""
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        key = _session_of(request) if request.method == "DELETE" else None
        if key is not None and MCP_SESSION_ID not in request.headers:
            await Response(status_code=204)(scope, receive, send)
        else:
            await self._handle(scope, receive, send)
        if key is not None:
            await self.sessions.end(key)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        full = False

        async def without_503(message: Message) -> None:
            # The SDK's only 503 rejects a session beyond the maximum, without a retry time.
            nonlocal full
            full |= message["type"] == "http.response.start" and message["status"] == 503
            if not full:
                await send(message)

        await self._manager.handle_request(scope, receive, without_503)
        if full:
            raise TrackwayError(
                ErrorCode.OVERLOADED,
                f"expected fewer than {self._max_sessions} MCP sessions on this replica; end sessions by DELETE, "
                "wait for idle ones to expire, or raise mcp_max_sessions",
            )

    async def _list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=self._tools())

    def _tools(self) -> list[Tool]:
        functions = [schema.function for schema in self._server.schemas()]
        return [
            Tool(
                name=function.name,
                description=function.description,
                input_schema={"type": "object", **function.parameters},
            )
            for function in functions
        ]

    async def _call_tool(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        try:
            meta = RequestMeta.model_validate(context.meta or {})
        except ValidationError as error:
            raise MCPError(INVALID_PARAMS, f"_meta: {problems_of(error)}") from None
        request = ExecuteRequest(arguments=params.arguments or {}, execute_kwargs=meta.execute_kwargs)
        try:
            return await self._run(params.name, request, meta, _session_of(context.request))
        except TrackwayError as error:
            if error.code is ErrorCode.UNKNOWN_TOOL:
                raise MCPError(INVALID_PARAMS, error.message) from error
            return to_mcp_error(error)

    async def _run(
        self, tool: str, request: ExecuteRequest, meta: RequestMeta, key: SessionKey | None
    ) -> CallToolResult:
        if key is None or tool in self._server.stateless():
            once = OneShotRequest(**request.model_dump(), create_kwargs=meta.create_kwargs)
            result = await self._server.one_shot(tool, once)
            return _answer(result, None, result.instance_reward)
        instance_id, result = await self.sessions.execute(key, tool, request, meta.create_kwargs)
        reward = await self._server.reward(instance_id) if meta.want_reward else None
        return _answer(result, instance_id, reward)


def _answer(result: ToolResult, instance_id: str | None, instance_reward: float | None) -> CallToolResult:
    meta = ResultMeta(
        reward=result.reward, metrics=result.metrics, instance_id=instance_id, instance_reward=instance_reward
    )
    return to_mcp(result, meta)


def _session_of(request: Request | None) -> SessionKey | None:
    """The caller and its session; None when the request names no session."""
    if request is None:
        return None
    named = request.headers.get(MCP_SESSION_ID) or request.headers.get(SESSION_ID)
    return (request.scope[CALLER].name, named) if named else None
