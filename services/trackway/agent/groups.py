"""Groups of rollouts: run concurrently, returned as each ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from prometheus_client import Counter, Gauge, Histogram

from trackway.agent.context import AgentContext
from trackway.agent.episode import RolloutWaits, current_rollout
from trackway.agent.loop import AgentLoop, agent_loop
from trackway.clients import Deadline
from trackway.clients.in_flight import RolloutLimiter
from trackway.serving.metrics import Collectors, OperationDuration
from trackway.serving.middleware import is_cancelled
from trackway.serving.user_code import contained
from trackway.system.waits import FairSlots
from trackway.wire.agent import GroupRequest, GroupWaits
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

MakeLoop = Callable[[AgentContext], AgentLoop]
"""An agent loop's class, or a function that makes one."""
_SLACK_S = 1.0
"""Time allowed for the work around a release."""
_UPDATE_S = 2.0
"""Time between updates of the limit."""
_LOADS_S = 10.0
"""Longest wait for the replicas' loads."""
_CALLS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Buckets advised by the GenAI conventions."""


class Groups:
    """Runs the rollouts of every group of this process, at most `max_concurrent_trajectories` at once, and sessions.

    Runs share these slots fairly.
    """

    def __init__(self, services: AgentContext) -> None:
        self._services = services
        self._limiter = services.limiter
        self._slots = FairSlots(
            services.settings.max_concurrent_trajectories if self._limiter is None else self._limiter.limit
        )
        self._following: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Trajectory]] = set()
        self._ended = Counter(
            "trackway_trajectories", "Ended trajectories by kind and outcome", ["kind", "outcome"], registry=None
        )
        running = Gauge("trackway_trajectories_running", "Trajectories that run or wait for a slot", registry=None)
        running.set_function(lambda: self.running)
        self._duration = OperationDuration(
            "invoke_agent", "invoke_agent", "Duration of trajectories in seconds", "gen_ai_agent_name"
        )
        self._calls = [
            Histogram(f"gen_ai_invoke_agent_{name}", description, ["gen_ai_agent_name"], buckets=_CALLS, registry=None)
            for name, description in (
                ("inference_calls", "Answered model calls of a trajectory"),
                ("tool_calls", "Tool calls of a trajectory"),
            )
        ]
        gauges = [running]
        if (limiter := self._limiter) is not None:
            gauges.append(Gauge("trackway_trajectories_limit", "Most trajectories that run", registry=None))
            gauges[-1].set_function(lambda: limiter.limit)
        self.metrics = Collectors(*gauges, self._ended, self._duration, *self._calls)
        """An outcome is a stop reason, an error code, or `aborted`."""
        self._closed = False

    @property
    def running(self) -> int:
        """Unfinished trajectories, including those that wait for a slot."""
        return len(self._tasks)

    def limit(self) -> str:
        """The number of trajectories that the engines' KV caches allow, and why. Empty if it is fixed."""
        return "" if self._limiter is None else f"at most {self._limiter.limit} at once: {self._limiter.reason}"

    async def _follow(self, limiter: RolloutLimiter) -> None:
        """Let the slots follow the engines' load while trajectories run or wait."""
        rollout, replica = self._services.rollout, self._services.settings.replica
        while self._tasks:
            try:
                loads = await rollout.loads(replica, Deadline.after(_LOADS_S))
                self._slots.resize(limiter.update(loads, self._slots.held, time.monotonic()))
            except TrackwayError as error:
                limiter.reason = f"the engines' load is unknown: {error.message}"
            await asyncio.sleep(_UPDATE_S)

    def start(self, request: GroupRequest) -> AsyncGenerator[Trajectory | GroupWaits, None]:
        """The requested rollouts, each as it ends, and what they wait for when the request asks for it.

        Closing the generator or the service aborts the rest.

        Raises:
            TrackwayError: at once, `unknown_agent`, `invalid_request`, or `unavailable` when the service stops.
        """
        if self._closed:
            raise stopping()
        loop = agent_loop(request.sample.agent_name)
        return self._run(loop, request, checked_rollouts(request))

    async def _run(
        self, loop: type[AgentLoop], request: GroupRequest, rollouts: list[int]
    ) -> AsyncGenerator[Trajectory | GroupWaits, None]:
        waits = [RolloutWaits(request.tags(rollout_n)) for rollout_n in rollouts]
        tasks = [
            self._spawn(loop, request, rollout_n, waiting, self._slots)
            for rollout_n, waiting in zip(rollouts, waits, strict=True)
        ]
        running = set(tasks)
        try:
            while running:
                ended, running = await asyncio.wait(
                    running, timeout=request.report_waits_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in tasks:
                    if task in ended:
                        yield await task
                if not ended:
                    current = [wait for waiting in waits for wait in waiting.current()]
                    yield GroupWaits(waits=current, now=time.time_ns() // 1_000_000)
        except asyncio.CancelledError:
            if not self._closed or is_cancelled():
                raise
            # On shutdown the stream ends early, and the client requests the missing rollouts elsewhere.
        finally:
            for task in tasks:
                task.cancel("the group was closed before this rollout ended")
            if any(not task.done() for task in tasks):
                await asyncio.wait(tasks)

    def launch(self, loop: MakeLoop, request: GroupRequest) -> asyncio.Task[Trajectory]:
        """Run the one rollout of a request with this loop, in a task of its own. Raises TrackwayError as `start`.

        It does not use a rollout slot. The caller limits how many run.
        """
        if self._closed:
            raise stopping()
        [rollout_n] = checked_rollouts(request)
        return self._spawn(loop, request, rollout_n, RolloutWaits(request.tags(rollout_n)), FairSlots(1))

    async def close(self) -> None:
        """Abort all rollouts and reject new ones. Tool instances are released within their time limit."""
        self._closed = True
        for task in self._tasks:
            task.cancel("the agent service stops")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._services.settings.release_timeout_s + _SLACK_S)
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    def _spawn(
        self, loop: MakeLoop, request: GroupRequest, rollout_n: int, waits: RolloutWaits, slots: FairSlots
    ) -> asyncio.Task[Trajectory]:
        task = asyncio.create_task(self._one(loop, request, rollout_n, waits, slots))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._limiter is not None and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._follow(self._limiter))
        return task

    async def _one(
        self, loop: MakeLoop, request: GroupRequest, rollout_n: int, waits: RolloutWaits, slots: FairSlots
    ) -> Trajectory:
        outcome = "aborted"
        current_rollout.set(waits)
        try:
            with waits("a free slot of its agent replica", progress=self.limit):
                await slots.acquire(request.run)
            try:
                with waits("its agent loop"):
                    trajectory = await contained(self._lived(loop, request, rollout_n))
            finally:
                slots.release(request.run)
            outcome = trajectory.error.code.value if trajectory.error else trajectory.stop_reason.value
            return trajectory
        finally:
            self._ended.labels("validation" if request.validation else "training", outcome).inc()

    async def _lived(self, loop: MakeLoop, request: GroupRequest, rollout_n: int) -> Trajectory:
        agent, started, error_type = loop(self._services), time.perf_counter(), "aborted"
        try:
            trajectory = await agent.run(request, rollout_n)
            error_type = trajectory.error.code.value if trajectory.error else ""
            turns = [turn for row in (trajectory, *trajectory.further_rows) for turn in row.turns]
            for calls, number in zip(self._calls, (len(turns), sum(len(turn.calls) for turn in turns)), strict=True):
                calls.labels(agent.agent_name).observe(number)
            return trajectory
        finally:
            self._duration.observe(time.perf_counter() - started, error_type, agent.agent_name)


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
