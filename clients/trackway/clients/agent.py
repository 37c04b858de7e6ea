"""Client of the agent service."""

from collections.abc import AsyncIterator

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.agent import AgentInfo, AgentList, GroupRequest
from trackway.wire.trajectory import Trajectory


class AgentClient(ServiceClient):
    """Requests trajectories; every method raises TrackwayError."""

    async def group(self, request: GroupRequest, deadline: Deadline | None = None) -> AsyncIterator[Trajectory]:
        """Yields each trajectory of a group as it ends; after a broken stream, request the missing `rollouts`."""
        async with self.stream("POST", "/groups", body=request, deadline=deadline) as lines:
            async for line in lines:
                if line:
                    yield Trajectory.model_validate_json(line)

    async def agents(self) -> list[AgentInfo]:
        """Every agent loop."""
        return (await self.call("GET", "/agents", reply=AgentList)).agents
