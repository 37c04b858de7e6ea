"""Client of the agent service."""

import time
from collections.abc import AsyncIterator, Callable

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.agent import AgentList, GroupRequest, GroupWaits
from trackway.wire.service import Wait
from trackway.wire.trajectory import Trajectory

_WAITS = '{"waits":'
"""How a line begins that is no trajectory."""


_SKEW_MS = 5000
"""Difference of two clocks that is worth telling. A line is on its way for less."""


class AgentClient(ServiceClient):
    """Requests trajectories. Every method raises TrackwayError."""

    service = "agent"

    async def group(
        self,
        request: GroupRequest,
        deadline: Deadline | None = None,
        on_waits: Callable[[list[Wait]], None] = lambda waits: None,
    ) -> AsyncIterator[Trajectory]:
        """Yields each trajectory of a group as it ends; after a broken stream, request the missing `rollouts`.

        `on_waits` is called with what the rollouts wait for, as often as the request asks for it. Its times are by the
        clock of this machine. A wait names a difference of the clocks.
        """
        async with self.stream("POST", "/groups", body=request, deadline=deadline) as lines:
            async for line in lines:
                if line.startswith(_WAITS):
                    on_waits(_by_our_clock(GroupWaits.model_validate_json(line)))
                elif line:
                    yield Trajectory.model_validate_json(line)

    async def agents(self) -> AgentList:
        """Every agent loop."""
        return await self.call("GET", "/agents", reply=AgentList)


def _by_our_clock(told: GroupWaits) -> list[Wait]:
    ahead_ms = told.now - time.time_ns() // 1_000_000
    if abs(ahead_ms) <= _SKEW_MS:
        return told.waits
    where = "ahead of" if ahead_ms > 0 else "behind"
    skew = f"its agent's clock is {abs(ahead_ms) / 1000:.0f} s {where} this machine's"
    return [_shifted(wait, ahead_ms, skew) for wait in told.waits]


def _shifted(wait: Wait, by_ms: int, skew: str = "") -> Wait:
    return wait.model_copy(
        update={
            "since": wait.since - by_ms,
            "until": None if wait.until is None else wait.until - by_ms,
            "progress": "; ".join(filter(None, (wait.progress, skew))),
            "because": [_shifted(cause, by_ms) for cause in wait.because],
        }
    )
