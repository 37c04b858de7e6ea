"""Groups of rollouts: run concurrently, returned as each ends."""

import asyncio
from collections.abc import AsyncGenerator

from prometheus_client import Counter, Gauge

from trackway.agent.context import AgentContext
from trackway.agent.loop import AgentLoop, agent_loop
from trackway.serving.metrics import Collectors
from trackway.serving.user_code import contained
from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

_SLACK_S = 1.0
"""Time allowed for the work around a release."""


class Groups:
    """Runs the rollouts of every group of this process, at most `max_concurrent_trajectories` at once."""

    def __init__(self, services: AgentContext) -> None:
        self._services = services
        self._slots = asyncio.Semaphore(services.settings.max_concurrent_trajectories)
        self._tasks: set[asyncio.Task[Trajectory]] = set()
        self._ended = Counter(
            "trackway_trajectories", "Ended trajectories by kind and outcome", ["kind", "outcome"], registry=None
        )
        running = Gauge("trackway_trajectories_running", "Trajectories that run or wait for a slot", registry=None)
        running.set_function(lambda: self.running)
        self.metrics = Collectors(running, self._ended)
        """An outcome is a stop reason, an error code, or `aborted`."""
        self._closed = False

    @property
    def running(self) -> int:
        """Unfinished trajectories, including those that wait for a slot."""
        return len(self._tasks)

    def start(self, request: GroupRequest) -> AsyncGenerator[Trajectory, None]:
        """The requested rollouts, each as it ends; closing the generator or the service aborts the rest.

        Raises:
            TrackwayError: at once, `unknown_agent`, `invalid_request`, or `unavailable` when the service stops.
        """
        if self._closed:
            raise stopping()
        loop = agent_loop(request.sample.agent_name)
        return self._run(loop, request, checked_rollouts(request))

    async def _run(
        self, loop: type[AgentLoop], request: GroupRequest, rollouts: list[int]
    ) -> AsyncGenerator[Trajectory, None]:
        tasks = [self._spawn(loop, request, rollout_n) for rollout_n in rollouts]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        except asyncio.CancelledError:
            if not self._closed or _is_cancelled():
                raise
            # On shutdown the stream ends early, and the client requests the missing rollouts elsewhere.
        finally:
            for task in tasks:
                task.cancel("the group was closed before this rollout ended")
            if any(not task.done() for task in tasks):
                await asyncio.wait(tasks)

    async def close(self) -> None:
        """Abort all rollouts and reject new ones; tool instances are released within their time limit."""
        self._closed = True
        for task in self._tasks:
            task.cancel("the agent service stops")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._services.settings.release_timeout_s + _SLACK_S)

    def _spawn(self, loop: type[AgentLoop], request: GroupRequest, rollout_n: int) -> asyncio.Task[Trajectory]:
        task = asyncio.create_task(self._one(loop, request, rollout_n))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _one(self, loop: type[AgentLoop], request: GroupRequest, rollout_n: int) -> Trajectory:
        outcome = "aborted"
        try:
            async with self._slots:
                trajectory = await contained(self._lived(loop, request, rollout_n))
            outcome = trajectory.error.code.value if trajectory.error else trajectory.stop_reason.value
            return trajectory
        finally:
            self._ended.labels("validation" if request.validation else "training", outcome).inc()

    async def _lived(self, loop: type[AgentLoop], request: GroupRequest, rollout_n: int) -> Trajectory:
        return await loop(self._services).run(request, rollout_n)


def _is_cancelled() -> bool:
    """Whether the current task itself was cancelled, rather than one that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def stopping() -> TrackwayError:
    """The error for requests during shutdown."""
    return TrackwayError(
        ErrorCode.UNAVAILABLE, "this agent replica is shutting down; request the missing rollouts again"
    )


def checked_rollouts(request: GroupRequest) -> list[int]:
    """The rollout numbers of a request, without duplicates.

    Raises:
        TrackwayError: `invalid_request` when a number is repeated or outside 0..n-1.
    """
    rollouts = request.rollout_numbers()
    if len(set(rollouts)) != len(rollouts) or not all(0 <= number < request.n for number in rollouts):
        message = f"rollouts: expected different numbers in 0..n-1 (n is {request.n}), got {rollouts}; ask for those"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return rollouts
