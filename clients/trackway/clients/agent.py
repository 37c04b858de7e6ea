"""Client of the agent service."""

from collections.abc import AsyncIterator, Callable

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.agent import AgentList, GroupRequest, GroupWaits
from trackway.wire.health import Wait
from trackway.wire.trajectory import Trajectory

_WAITS = '{"waits":'
"""How a line begins that is no trajectory."""


class AgentClient(ServiceClient):
    """Requests trajectories; every method raises TrackwayError."""

    service = "agent"

    async def group(
        self,
        request: GroupRequest,
        deadline: Deadline | None = None,
        on_waits: Callable[[list[Wait]], None] = lambda waits: None,
    ) -> AsyncIterator[Trajectory]:
        """Yields each trajectory of a group as it ends; after a broken stream, request the missing `rollouts`.

        `on_waits` is called with what the rollouts wait for, as often as the request asks for it.
        """
        async with self.stream("POST", "/groups", body=request, deadline=deadline) as lines:
            async for line in lines:
                if line.startswith(_WAITS):
                    on_waits(GroupWaits.model_validate_json(line).waits)
                elif line:
                    yield Trajectory.model_validate_json(line)

    async def agents(self) -> AgentList:
        """Every agent loop."""
        return await self.call("GET", "/agents", reply=AgentList)
