"""Client of the tool server."""

from pydantic import JsonValue

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.chat import ToolSchema
from trackway.wire.tools import (
    CreateInstance,
    ExecuteRequest,
    InstanceCreated,
    OneShotRequest,
    ToolList,
    ToolResult,
    ToolReward,
)


class ToolsClient(ServiceClient):
    """Create, execute, reward, release; every method raises TrackwayError."""

    async def offer(self) -> ToolList:
        """Every tool as an OpenAI function schema, and which of them are stateless."""
        return await self.call("GET", "/tools", reply=ToolList)

    async def list(self) -> list[ToolSchema]:
        """Every tool as an OpenAI function schema."""
        return (await self.offer()).tools

    async def create(
        self,
        tool: str,
        session_id: str | None = None,
        create_kwargs: dict[str, JsonValue] | None = None,
        deadline: Deadline | None = None,
    ) -> InstanceCreated:
        """Make a tool's state for one trajectory."""
        body = CreateInstance(tool=tool, session_id=session_id, create_kwargs=create_kwargs or {})
        return await self.call(
            "POST", "/instances", reply=InstanceCreated, body=body, session_id=session_id, deadline=deadline
        )

    async def execute(
        self,
        instance_id: str,
        request: ExecuteRequest,
        session_id: str | None = None,
        deadline: Deadline | None = None,
    ) -> ToolResult:
        """One call of an instance."""
        path = f"/instances/{instance_id}/execute"
        return await self.call("POST", path, reply=ToolResult, body=request, session_id=session_id, deadline=deadline)

    async def reward(self, instance_id: str, session_id: str | None = None, deadline: Deadline | None = None) -> float:
        """The reward of an instance over its whole life."""
        path = f"/instances/{instance_id}/reward"
        reply = await self.call("POST", path, reply=ToolReward, session_id=session_id, deadline=deadline)
        return reply.reward

    async def release(self, instance_id: str, session_id: str | None = None, deadline: Deadline | None = None) -> None:
        """Forget an instance."""
        await self.send("DELETE", f"/instances/{instance_id}", session_id=session_id, deadline=deadline)

    async def one_shot(self, tool: str, request: OneShotRequest, deadline: Deadline | None = None) -> ToolResult:
        """Create, execute, reward and release in one request."""
        return await self.call("POST", f"/tools/{tool}/execute", reply=ToolResult, body=request, deadline=deadline)
