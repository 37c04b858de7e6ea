"""The tool server's app, and its background work."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from fastapi import APIRouter, FastAPI

from trackway.clients import RewardClient
from trackway.serving import service_app
from trackway.tools.base import BaseTool, ToolSource
from trackway.tools.builtin.search import SearchTool
from trackway.tools.core.instances import InstanceTable
from trackway.tools.core.server import SessionInstances, ToolServer
from trackway.tools.get_observation import ObservationFace
from trackway.tools.loading import tools_of
from trackway.tools.mcp.endpoint import McpFace
from trackway.tools.nemo_gym import NemoGymFace
from trackway.tools.routes import (
    add_fast_path,
    instance_routes,
    nemo_gym_routes,
    observation_routes,
    operator_routes,
    search_routes,
    tool_routes,
)
from trackway.tools.settings import ToolsSettings
from trackway.tracing import Tracing

logger = logging.getLogger("trackway.tools")


def create_app(
    settings: ToolsSettings | None = None,
    tools: Sequence[BaseTool | ToolSource] | None = None,
    tracing: Tracing | None = None,
    http: httpx.AsyncClient | None = None,
) -> FastAPI:
    """The tool server with the given tools, or those named in the settings. `http` replaces the shared HTTP client.

    ValueError or TypeError when a named tool cannot be loaded.
    """
    settings = settings or ToolsSettings()
    if tools is None:
        tools = tools_of(settings)
    instances = InstanceTable(settings.replica, settings.max_instances, settings.instance_ttl_s)
    server = ToolServer(tools, settings.limits, instances)
    mcp = McpFace(server, settings)
    observation = ObservationFace(server, settings.tool_concurrency)
    sessions = [mcp.sessions, observation.sessions]
    routers: list[APIRouter] = [tool_routes(server), instance_routes(server)]
    routers += [operator_routes(server), observation_routes(observation)]
    routers += [search_routes(tool) for tool in tools if isinstance(tool, SearchTool) and tool.embedded][:1]
    routers.append(APIRouter(routes=[mcp.route]))
    if settings.nemo_gym:
        gym = NemoGymFace(server, RewardClient(settings.url("reward"), http, token=settings.token))
        sessions.append(gym.sessions)
        routers.append(nemo_gym_routes(gym))  # the last one: its route of tools matches every path of one name

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        reaper = asyncio.create_task(reap_for_ever(server, sessions, settings.reap_interval_s))
        try:
            async with mcp.running():
                yield
        finally:
            reaper.cancel()
            await asyncio.gather(*(session_instances.close() for session_instances in sessions))
            await server.close()

    app = service_app("tools", settings, routers=routers, lifespan=lifespan, tracing=tracing, collectors=[server.calls])
    app.state.instances = instances
    add_fast_path(app, server)
    return app


async def reap_for_ever(server: ToolServer, sessions: Sequence[SessionInstances], interval_s: float) -> None:
    """Expire idle instances every `interval_s` seconds. Errors are logged."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await server.reap()
            for session_instances in sessions:
                session_instances.sweep()
        except Exception:
            logger.exception("the reaper failed; next try in %s s", interval_s)
