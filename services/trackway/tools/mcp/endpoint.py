"""Our tools at `/mcp`: Model Context Protocol over streamable HTTP, by the official SDK.

State lasts as long as the MCP session (`Mcp-Session-Id`, which the handshake opens). The protocol of 2026 has no
sessions: there the header `x-session-id` names one, and without it calls are independent. A call's `_meta` may have
`trackway/create_kwargs`. Its result's has the step reward and metrics (`ResultMeta`).

Responses are plain JSON and there is no event stream: the tools send no notifications, and an open stream would delay
the server's shutdown.
"""

from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from uuid import uuid4

from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import JsonValue, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from trackway.serving.auth import CALLER
from trackway.serving.limits import OpenSessions
from trackway.tools.core.server import SessionInstances, SessionKey, ToolServer
from trackway.tools.mcp.connection import RequestMeta, ResultMeta, to_mcp, to_mcp_error
from trackway.tools.settings import ToolsSettings, problems_of
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import SESSION_ID
from trackway.wire.tools import ExecuteRequest, OneShotRequest, ToolResult

Context = ServerRequestContext[dict[str, JsonValue], Request]

MCP_SESSION_ID = "mcp-session-id"


class McpFace:
    """The MCP endpoint of a tool server. `running` spans its lifetime, `route` is its route."""

    def __init__(self, server: ToolServer, settings: ToolsSettings) -> None:
        self._server = server
        most, idle_s = settings.mcp_max_sessions, settings.mcp_session_idle_s
        most_of_one = settings.mcp_max_sessions_per_token if settings.auth.given else None
        setting_names = ("mcp_max_sessions", "mcp_max_sessions_per_token")
        self._open = OpenSessions(most, most_of_one, min(settings.mcp_session_room_s, idle_s), setting_names)
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
            max_request_body_size=settings.max_body_bytes,
            max_sessions=None,  # `_open` bounds them
        )
        self.route = Route("/mcp", self, methods=["POST", "DELETE"], include_in_schema=False)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the session manager; once."""
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        session_id = request.headers.get(MCP_SESSION_ID)
        if request.method == "DELETE":
            if session_id is None:
                await Response(status_code=204)(scope, receive, send)
            else:
                await self._manager.handle_request(scope, receive, send)
                self._open.remove(session_id)
            if (key := _session_of(request)) is not None:
                await self.sessions.end(key)
        elif session_id is None and _opens(request):
            await self._begin(scope, receive, send)
        else:
            with self._open.in_use(session_id):
                await self._manager.handle_request(scope, receive, send)

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request open a session. Raises OVERLOADED."""
        caller = scope[CALLER].name
        while (ending := self._open.to_end(caller)) is not None:
            await self._end(ending)
        opening, opened = uuid4().hex, ""

        async def noted(message: Message) -> None:
            nonlocal opened
            if message["type"] == "http.response.start" and message["status"] < 400:
                opened = Headers(raw=message["headers"]).get(MCP_SESSION_ID, "")
            await send(message)

        self._open.add(opening, caller)
        try:
            with self._open.in_use(opening):
                await self._manager.handle_request(scope, receive, noted)
        finally:
            self._open.remove(opening)
            if opened:
                self._open.add(opened, caller)

    async def _end(self, session_id: str) -> None:
        """End a session as its client would."""
        caller = self._open.remove(session_id)
        headers = [(MCP_SESSION_ID.encode(), session_id.encode())]
        scope: Scope = {"type": "http", "method": "DELETE", "path": "/mcp", "query_string": b"", "headers": headers}
        await self._manager.handle_request(scope, _no_body, _unsent)
        if caller is not None:
            await self.sessions.end((caller, session_id))

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
            session_id = None if key is None else key[-1]
            once = OneShotRequest(**request.model_dump(), session_id=session_id, create_kwargs=meta.create_kwargs)
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


def _opens(request: Request) -> bool:
    """Return whether the SDK starts a session for this request. The 2026 protocol has no sessions."""
    return request.headers.get(MCP_PROTOCOL_VERSION_HEADER) in (None, *HANDSHAKE_PROTOCOL_VERSIONS)


async def _no_body() -> Message:
    return {"type": "http.request"}


async def _unsent(message: Message) -> None:
    """Drop the answer."""


def _session_of(request: Request | None) -> SessionKey | None:
    """The caller and its session, or None when the request names no session."""
    if request is None:
        return None
    named = request.headers.get(MCP_SESSION_ID) or request.headers.get(SESSION_ID)
    return (request.scope[CALLER].name, named) if named else None
