"""Groups of rollouts: run side by side, handed out as each ends."""

import asyncio
from collections.abc import AsyncGenerator

from trackway.agent.loop import AgentLoop, agent_loop
from trackway.agent.services import Services
from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory


class Groups:
    """Runs the rollouts of every group of this process, at most `max_concurrent_trajectories` at once."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._slots = asyncio.Semaphore(services.settings.max_concurrent_trajectories)
        self._tasks: set[asyncio.Task[Trajectory]] = set()

    @property
    def running(self) -> int:
        """Trajectories that have not ended, those that wait for a slot included."""
        return len(self._tasks)

    def start(self, request: GroupRequest) -> AsyncGenerator[Trajectory, None]:
        """The asked rollouts, each as it ends; closing the generator cancels those that run.

        Raises:
            TrackwayError: at once, `unknown_agent` or `invalid_request`.
        """
        loop = agent_loop(request.sample.agent_name)
        return self._run(loop, request, checked_rollouts(request))

    async def _run(
        self, loop: type[AgentLoop], request: GroupRequest, rollouts: list[int]
    ) -> AsyncGenerator[Trajectory, None]:
        tasks = [self._spawn(loop, request, rollout_n) for rollout_n in rollouts]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            if any(not task.done() for task in tasks):
                await asyncio.wait(tasks)

    def _spawn(self, loop: type[AgentLoop], request: GroupRequest, rollout_n: int) -> asyncio.Task[Trajectory]:
        task = asyncio.create_task(self._one(loop, request, rollout_n))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _one(self, loop: type[AgentLoop], request: GroupRequest, rollout_n: int) -> Trajectory:
        async with self._slots:
            return await loop(self._services).run(request, rollout_n)


def checked_rollouts(request: GroupRequest) -> list[int]:
    """The rollout numbers that a request asks for, each once.

    Raises:
        TrackwayError: `invalid_request` when one is asked for twice or does not lie in 0..n-1.
    """
    rollouts = request.rollout_numbers()
    if len(set(rollouts)) != len(rollouts) or not all(0 <= number < request.n for number in rollouts):
        message = f"rollouts: expected different numbers in 0..n-1 (n is {request.n}), got {rollouts}; ask for those"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return rollouts
