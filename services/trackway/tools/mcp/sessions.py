"""Our sessions with an MCP server: one per trajectory, or a shared one.

Session state of a server must last as long as the trajectory and be visible to no other. So a server with sessions gets
one per trajectory, shared by all its tools there, opened at the first call and closed with the last instance. A server
without sessions is called over one connection.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from mcp.types import CallToolResult, Tool
from pydantic import Field, JsonValue

from trackway.serving.own_code import FunctionsOutage
from trackway.tools.mcp.connection import ConnectionLost, McpConnection, Meta
from trackway.tools.mcp.servers_file import McpServer
from trackway.tools.user_files import UserEntry
from trackway.wire.errors import ErrorCode, TrackwayError


class McpLimits(UserEntry):
    """How sessions are kept; from the YAML entry's `config`."""

    sessions: Literal["auto", "trajectory", "shared"] = "auto"
    """One session per trajectory, or a shared one. "auto": per trajectory if the server has sessions, which a process
    that we start always has."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for a server's first response. A process may have to be downloaded first."""
    max_sessions: int | None = Field(default=None, ge=1)
    """Maximum trajectories with a session, by default 64 processes or 1024 ids. Beyond it calls are answered 429."""


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
