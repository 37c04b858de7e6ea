"""The tool server over HTTP. Routes only: the work is in server.py.

One rule for errors: 4xx is the caller's mistake (the agent shows a 422 to the model), 5xx is ours or the tool's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Body, FastAPI

from trackway.serving import service_app
from trackway.tools import examples
from trackway.tools.base import BaseTool
from trackway.tools.instances import InstanceTable
from trackway.tools.registry import load_tools
from trackway.tools.server import ToolServer
from trackway.tools.settings import ToolsSettings
from trackway.tracing import Tracing
from trackway.wire.tools import (
    CreateInstance,
    ExecuteRequest,
    InstanceCreated,
    OneShotRequest,
    ToolList,
    ToolResult,
    ToolReward,
)

logger = logging.getLogger("trackway.tools")


def create_app(
    settings: ToolsSettings | None = None,
    tools: Sequence[BaseTool] | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The tool server with the tools given, or those that the settings name.

    ValueError or TypeError when a named tool cannot be loaded.
    """
    settings = settings or ToolsSettings()
    if tools is None:
        tools = load_tools(settings.tools, settings.extra_tools, settings.tool_config)
    instances = InstanceTable(settings.replica, settings.max_instances, settings.instance_ttl_s)
    server = ToolServer(tools, settings.limits, instances)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        reaper = asyncio.create_task(reap_for_ever(server, settings.reap_interval_s))
        try:
            yield
        finally:
            reaper.cancel()
            await server.close()

    return service_app("tools", settings, routers=[routes(server)], lifespan=lifespan, tracing=tracing)


async def reap_for_ever(server: ToolServer, interval_s: float) -> None:
    """Look for idle instances every `interval_s` seconds; a failure is logged and the next look comes."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await server.reap()
        except Exception:
            logger.exception("the reaper failed; next try in %s s", interval_s)


def routes(server: ToolServer) -> APIRouter:
    """The server's six routes."""
    router = APIRouter(tags=["tools"])

    @router.get("/tools", responses=examples.answer(200, examples.TOOLS))
    async def list_tools() -> ToolList:
        """Every tool as an OpenAI function schema, ready for a chat request's `tools`."""
        return ToolList(tools=server.schemas(), stateless=server.stateless())

    @router.post("/instances", status_code=201, responses=examples.answer(201, examples.CREATED))
    async def create(request: Annotated[CreateInstance, Body(examples=[examples.CREATE])]) -> InstanceCreated:
        """Make one tool's state for one trajectory. 404 unknown_tool, 422 wrong create_kwargs, 429 overloaded."""
        return await server.create(request)

    @router.post("/instances/{instance_id}/execute", responses=examples.answer(200, examples.EXECUTED))
    async def execute(
        instance_id: str, request: Annotated[ExecuteRequest, Body(examples=[examples.EXECUTE])]
    ) -> ToolResult:
        """One call; calls of one instance run one after another.

        422 wrong arguments, 404 instance_not_found, 410 instance_lost, 500 tool_failed, 504 deadline_exceeded.
        """
        return await server.execute(instance_id, request)

    @router.post("/instances/{instance_id}/reward", responses=examples.answer(200, examples.REWARD))
    async def reward(instance_id: str) -> ToolReward:
        """The reward of an instance over its whole life."""
        return ToolReward(reward=await server.reward(instance_id))

    @router.delete("/instances/{instance_id}", status_code=204)
    async def release(instance_id: str) -> None:
        """Forget an instance; a second time is 404."""
        await server.release(instance_id)

    @router.post("/tools/{name}/execute", responses=examples.answer(200, examples.CALCULATED))
    async def one_shot(name: str, request: Annotated[OneShotRequest, Body(examples=[examples.ONE_SHOT])]) -> ToolResult:
        """Create, execute, reward and release in one request, for tools that need no state between calls."""
        return await server.one_shot(name, request)

    return router
