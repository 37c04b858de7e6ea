"""The tools of MCP servers: listed at start-up, called like any other tool."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mcp import MCPError
from mcp.types import INVALID_PARAMS, Tool
from pydantic import JsonValue, ValidationError

from trackway.serving.own_code import FunctionsOutage
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError, ToolLimits, ToolSource, current_session
from trackway.tools.mcp.connection import ConnectionLost
from trackway.tools.mcp.results import RequestMeta, from_mcp, meta_of
from trackway.tools.mcp.servers_file import McpServer, read_servers
from trackway.tools.mcp.sessions import Held, McpLimits, McpSessions
from trackway.tools.user_files import problems_of
from trackway.tools.verl.tool_config import McpEntry
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ToolResult

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
