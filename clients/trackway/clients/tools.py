"""Client of the tool server."""

import uuid
from urllib.parse import quote, urlencode

from pydantic import JsonValue

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.chat import ToolSchema
from trackway.wire.tools import (
    CreateInstance,
    ExecuteRequest,
    InstanceCreated,
    InstanceList,
    OneShotRequest,
    OneShotResult,
    ReleaseRequest,
    RewardRequest,
    SessionReleased,
    ToolList,
    ToolResult,
    ToolReward,
)


class ToolsClient(ServiceClient):
    """Create, execute, reward, release. Every method raises TrackwayError."""

    service = "tools"

    def _holder(self, path: str) -> str | None:
        """The replica that created the instance in a path. Instance ids begin with its name."""
        _, _, instance_id = path.partition("/instances/")
        return instance_id.partition("-")[0] or None

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
        """Create a tool's state for one trajectory."""
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
        """Run one call of an instance."""
        path = f"/instances/{instance_id}/execute"
        return await self.call("POST", path, reply=ToolResult, body=request, session_id=session_id, deadline=deadline)

    async def reward(
        self,
        instance_id: str,
        session_id: str | None = None,
        deadline: Deadline | None = None,
        calc_reward_kwargs: dict[str, JsonValue] | None = None,
    ) -> float:
        """The reward of an instance for all its calls."""
        path = f"/instances/{instance_id}/reward"
        body = RewardRequest(calc_reward_kwargs=calc_reward_kwargs) if calc_reward_kwargs else None
        reply = await self.call("POST", path, reply=ToolReward, body=body, session_id=session_id, deadline=deadline)
        return reply.reward

    async def release(
        self,
        instance_id: str,
        session_id: str | None = None,
        deadline: Deadline | None = None,
        release_kwargs: dict[str, JsonValue] | None = None,
    ) -> None:
        """Release an instance."""
        body = ReleaseRequest(release_kwargs=release_kwargs) if release_kwargs else None
        await self.send("DELETE", f"/instances/{instance_id}", body=body, session_id=session_id, deadline=deadline)

    async def instances(self, session_id: str | None = None, limit: int = 1000) -> InstanceList:
        """The instances of the replica that answers. Needs a token with the scope `admin`."""
        wanted = {"limit": str(limit)} | ({} if session_id is None else {"session_id": session_id})
        return await self.call("GET", f"/instances?{urlencode(wanted)}", reply=InstanceList)

    async def release_session(self, session_id: str) -> SessionReleased:
        """Release all instances of a trajectory. Needs a token with the scope `admin`."""
        path = f"/sessions/{quote(session_id, safe='')}"
        return await self.call("DELETE", path, reply=SessionReleased, session_id=session_id)

    async def one_shot(self, tool: str, request: OneShotRequest, deadline: Deadline | None = None) -> OneShotResult:
        """Create, execute, reward and release in one request."""
        path, session_id = f"/tools/{tool}/execute", uuid.uuid4().hex  # routes a retry to the same replica
        return await self.call(
            "POST", path, reply=OneShotResult, body=request, session_id=session_id, deadline=deadline
        )
