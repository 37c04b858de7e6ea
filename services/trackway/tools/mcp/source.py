"""The tools of MCP servers: listed at start-up, called like any other tool.

Our sessions with an MCP server: one per trajectory, or a shared one.

Session state of a server must last as long as the trajectory and be visible to no other. So a server with sessions gets
one per trajectory, shared by all its tools there, opened at the first call and closed with the last instance. A server
without sessions is called over one connection.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from mcp import MCPError
from mcp.types import INVALID_PARAMS, CallToolResult, Tool
from pydantic import Field, JsonValue, ValidationError

from trackway.serving.user_code import FunctionsOutage
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError, ToolLimits, ToolSource, current_session
from trackway.tools.mcp.connection import (
    ConnectionLost,
    McpConnection,
    McpServer,
    Meta,
    RequestMeta,
    from_mcp,
    meta_of,
    read_servers,
)
from trackway.tools.settings import UserEntry, problems_of
from trackway.tools.verl import McpEntry
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ToolResult


class McpLimits(UserEntry):
    """Limits of sessions, from the YAML entry's `config`."""

    sessions: Literal["auto", "trajectory", "shared"] = "auto"
    """One session per trajectory, or a shared one. `auto`: per trajectory if the server keeps sessions, as every
    process does."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for a server's first response. Without it the tool server does not start."""
    max_sessions: int | None = Field(default=None, ge=1)
    """Maximum trajectories with a session, by default 64 with a command and 1024 with a URL. Beyond it calls are
    answered 429."""


@dataclass(eq=False)
class Held:
    """The session of one trajectory, or the shared one."""

    session: str | None
    users: int = 0
    connection: McpConnection | None = None
    lost: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class McpSessions:
    """The sessions with a server. Calls raise TrackwayError, and MCPError when the server rejects the request."""

    def __init__(self, server: McpServer, name: str, limits: McpLimits, outage: FunctionsOutage | None = None) -> None:
        self._server = server
        self._name = name
        self._limits = limits
        self._outage = outage
        self._free_sessions = limits.max_sessions or (64 if server.command is not None else 1024)
        self._shared = Held(None)
        self._held: dict[str, Held] = {}
        # Only the handshake opens a session; "auto" uses the newest protocol, which has none.
        self._mode: Literal["legacy", "auto"] = "auto" if limits.sessions == "shared" else "legacy"
        self.by_trajectory = limits.sessions == "trajectory"
        """True if each trajectory has its own session; "auto" is resolved by `discover`."""

    async def discover(self) -> list[Tool]:
        """Connect once and list the tools. ConnectionLost when the server cannot be reached."""
        try:
            connection = await self._connected(self._shared)
        except ConnectionLost as error:
            if not error.no_handshake or self.by_trajectory:
                raise
            self._mode = "auto"
            connection = await self._connected(self._shared)
        tools = await connection.tools(self._limits.connect_timeout_s)
        if self._limits.sessions == "auto":
            self.by_trajectory = connection.keeps_session
        if self.by_trajectory:
            await self._disconnect(self._shared, connection)
        return tools

    def join(self, session: str) -> Held:
        """Join the session of a trajectory, with one more instance."""
        if not self.by_trajectory:
            return self._shared
        held = self._held.setdefault(session, Held(session))
        held.users += 1
        return held

    async def leave(self, held: Held) -> None:
        """Leave the session. The last instance closes it."""
        if held is self._shared:
            return
        held.users -= 1
        if held.users == 0:
            self._forget(held)
            await self._disconnect(held, held.connection)

    async def call(self, held: Held, tool: str, arguments: dict[str, JsonValue], meta: Meta) -> CallToolResult:
        """Run a call in that session.

        INSTANCE_LOST when the session ended with its state. UNAVAILABLE, which can be retried, when nothing is lost.
        """
        connection: McpConnection | None = None
        try:
            connection = await self._connected(held)
            result = await connection.call(tool, arguments, meta)
        except ConnectionLost as error:
            await self._disconnect(held, connection)
            if held is not self._shared and connection is not None:
                held.lost = True
                self._forget(held)
                raise self._instance_lost(str(error)) from error
            if self._outage is not None:
                raise self._outage.error(error) from error
            raise TrackwayError(ErrorCode.UNAVAILABLE, f"{error}; retry, or restart the server") from error
        if self._outage is not None:
            self._outage.began = None
        return result

    async def close(self) -> None:
        """End every session."""
        everything = [self._shared, *self._held.values()]
        self._held.clear()
        await asyncio.gather(*(self._disconnect(held, held.connection) for held in everything))

    async def _connected(self, held: Held) -> McpConnection:
        async with held.opening:
            if held.lost:
                raise self._instance_lost("its session has ended")
            if held.connection is None:
                held.connection = await self._opened(held)
            return held.connection

    async def _opened(self, held: Held) -> McpConnection:
        connection = McpConnection(self._server, self._name, held.session, self._mode)
        if held is self._shared:
            await connection.open(self._limits.connect_timeout_s)
            return connection
        if self._free_sessions == 0:
            raise TrackwayError(
                ErrorCode.OVERLOADED,
                f"MCP server {self._name!r}: expected a free session, got as many trajectories as max_sessions allows; "
                "ask again later, raise it, or set sessions to 'shared' if the server keeps no state",
            )
        self._free_sessions -= 1
        try:
            await connection.open(self._limits.connect_timeout_s)
        except BaseException:
            self._free_sessions += 1
            raise
        return connection

    async def _disconnect(self, held: Held, connection: McpConnection | None) -> None:
        """Close the connection, unless another call has closed it and opened the next."""
        if connection is None or held.connection is not connection:
            return
        held.connection = None
        if held is not self._shared:
            self._free_sessions += 1
        await connection.close()

    def _forget(self, held: Held) -> None:
        if held.session is not None and self._held.get(held.session) is held:
            del self._held[held.session]

    def _instance_lost(self, reason: str) -> TrackwayError:
        message = f"MCP server {self._name!r}: {reason}; create the instance again and replay its calls"
        return TrackwayError(ErrorCode.INSTANCE_LOST, message)


logger = logging.getLogger("trackway.tools")


@dataclass
class _State:
    held: Held
    create_kwargs: dict[str, JsonValue]
    reward: float = 0.0


class McpTool(BaseTool):
    """A tool of an MCP server; `create_kwargs` and rewards reach another Trackway server through `_meta`."""

    def __init__(self, tool: Tool, prefix: str, config: ToolConfig, sessions: McpSessions) -> None:
        # MCP allows dots and slashes in a name, OpenAI's format does not.
        name = re.sub("[^A-Za-z0-9_-]", "_", prefix + tool.name)
        function = FunctionSchema(name=name, description=tool.description or "", parameters=tool.input_schema)
        super().__init__(config, ToolSchema(function=function))
        self._remote_name = tool.name
        self._sessions = sessions
        self._states: dict[str, _State] = {}
        self.stateless = not sessions.by_trajectory

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        """Join the trajectory's session."""
        self._states[instance_id] = _State(self._sessions.join(current_session() or instance_id), create_kwargs)

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Run a call. Arguments that the server rejects are the caller's error, other rejections the tool's."""
        state = self._states[instance_id]
        meta = RequestMeta(create_kwargs=state.create_kwargs, execute_kwargs=execute_kwargs, want_reward=True)
        try:
            result = await self._sessions.call(state.held, self._remote_name, arguments, meta.to_wire())
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolInputError(f"{self.name}: {error.message}", tool=self.name) from error
            raise TrackwayError(ErrorCode.TOOL_FAILED, f"{self.name}: {error.message}", tool=self.name) from error
        state.reward = meta_of(result).instance_reward or 0.0
        return from_mcp(self.name, result)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        """The last reward from another Trackway server. MCP itself has no rewards."""
        return self._states[instance_id].reward

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """Leave the session."""
        await self._sessions.leave(self._states.pop(instance_id).held)


class McpSource(ToolSource):
    """Servers by name, and their selected tools. None is all. ValueError when the config is invalid.

    outage: counts the time for which the servers' process does not answer. Calls then wait for it.
    """

    def __init__(
        self,
        origin: str,
        servers: Mapping[str, McpServer],
        config: ToolConfig,
        selected: Sequence[str] | None = None,
        outage: FunctionsOutage | None = None,
    ) -> None:
        super().__init__(origin)
        self._selected = selected
        self._config, self._limits = _split(origin, config)
        self._servers = servers
        self._outage = outage
        self._sessions: list[McpSessions] = []

    @classmethod
    def of_entry(cls, origin: str, entry: McpEntry, config: ToolConfig, folder: Path) -> Self:
        """The servers of a YAML entry. ValueError when its config or its servers file is invalid."""
        try:
            servers = read_servers(entry.mcp_servers_config_path, folder)
        except ValueError as error:
            raise ValueError(f"{origin}, mcp_servers_config_path: {error}") from error
        return cls(origin, servers, config, entry.tool_selected_list)

    async def open(self) -> list[BaseTool]:
        """Every selected tool of every server. ValueError when a server cannot be reached or lacks a selected tool."""
        answers = await asyncio.gather(
            *(self._ask(name, server) for name, server in self._servers.items()), return_exceptions=True
        )
        for outcome in answers:
            if isinstance(outcome, BaseException):
                raise outcome
        offered = [named for tools in answers if not isinstance(tools, BaseException) for named in tools]
        missing = sorted(set(self._selected or ()) - {remote for remote, _ in offered})
        if missing:
            known = ", ".join(remote for remote, _ in offered)
            raise ValueError(f"{self.origin}: expected tool_selected_list out of {known}, got {', '.join(missing)}")
        return [tool for remote, tool in offered if self._selected is None or remote in self._selected]

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(sessions.close() for sessions in self._sessions))

    async def _ask(self, name: str, server: McpServer) -> list[tuple[str, McpTool]]:
        sessions = McpSessions(server, name, self._limits, self._outage)
        self._sessions.append(sessions)
        try:
            tools = await sessions.discover()
        except ConnectionLost as error:
            raise ValueError(f"{self.origin}: {error}; start it, or correct its entry") from error
        named_tools = [(tool.name, McpTool(tool, server.name_prefix, self._config, sessions)) for tool in tools]
        for _, tool in named_tools:
            tool.origin = f"{self.origin}, MCP server {name!r}"
        return named_tools


def _split(origin: str, config: ToolConfig) -> tuple[ToolConfig, McpLimits]:
    """The config of the tools and of the sessions. verl's key `timeout` is the call's time limit."""
    config = dict(config)
    if "timeout" in config:
        config.setdefault("call_timeout_s", config.pop("timeout"))
    if "rate_limit" in config:
        limit = config.pop("rate_limit")
        logger.warning("%s: rate_limit %s has no effect: calls are bounded by tool_concurrency", origin, limit)
    of_tools = {key: value for key, value in config.items() if key in ToolLimits.model_fields}
    try:
        limits = McpLimits.model_validate({key: value for key, value in config.items() if key not in of_tools})
    except ValidationError as error:
        raise ValueError(f"{origin}, config: {problems_of(error)}") from None
    return of_tools, limits
