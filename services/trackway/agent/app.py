"""The agent service: a dataset row in, trajectories out."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from trackway.agent.context import AgentContext
from trackway.agent.groups import Groups, checked_rollouts, stopping
from trackway.agent.loop import agents
from trackway.agent.sessions.external import register_external
from trackway.agent.sessions.fast_path import PassingOn, add_fast_path
from trackway.agent.sessions.routes import MODEL_CALLS, guest, session_routes
from trackway.agent.settings import AgentSettings
from trackway.agent.tool_agent import register_environments
from trackway.agent.verl import load_loops
from trackway.clients import AgentClient
from trackway.serving import ServiceRouter, service_app
from trackway.serving.middleware import NdjsonStream
from trackway.tracing import Tracing
from trackway.wire.agent import AgentList, GroupRequest, GroupWaits
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Ready
from trackway.wire.trajectory import Trajectory


def create_app(
    settings: AgentSettings | None = None,
    http: httpx.AsyncClient | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The agent service. `http` replaces the process's shared client, e.g. to reach the other services in-process.

    Raises:
        OSError: `model_path` holds no tokenizer.
        OwnCodeError: an own loop cannot be loaded.
        ValueError: the tokenizer has no chat template.
    """
    settings = settings or AgentSettings()  # pyright: ignore[reportCallIssue]  model_path comes from the environment
    load_loops(settings)
    register_external(settings)
    register_environments(settings)
    context = AgentContext.connect(settings, http)
    groups = Groups(context)
    own = AgentClient(settings.url("agent"), http, token=settings.token, direct=settings.direct and http is None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await groups.close()

    async def ready() -> Ready:
        return Ready(ready=True, reason=groups.limit())

    app = service_app(
        "agent",
        settings,
        routers=[_routes(groups, context), *session_routes(context, groups)],
        lifespan=lifespan,
        ready=ready,
        tracing=tracing,
        collectors=[groups.metrics, _RoutedCalls(context)],
        guests=partial(guest, context.sessions),
    )
    app.state.passing_on = PassingOn(context.sessions, own)
    add_fast_path(app, context.sessions, MODEL_CALLS)
    context.sessions.direct_url = lambda: app.state.direct_url
    return app


def _routes(groups: Groups, context: AgentContext) -> ServiceRouter:
    router = ServiceRouter(tags=["agent"])

    @router.post(
        "/groups", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}}
    )
    async def run_group(request: GroupRequest) -> StreamingResponse:
        """Run n rollouts of a sample. Streams one Trajectory per line of NDJSON, each as it ends.

        With `report_waits_s`, a line `{"waits": [...]}` says what they wait for whenever none has ended for so long.
        """
        return NdjsonStream(_lines(groups.start(request)))

    @router.post("/trajectories")
    async def run_trajectory(request: GroupRequest) -> Trajectory:
        """Run one rollout of a sample (n = 1, or one number in `rollouts`) and wait for it."""
        if len(checked_rollouts(request)) != 1:
            message = f"expected one rollout, got {request.rollout_numbers()}; use POST /groups for several"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        async with aclosing(groups.start(request)) as trajectories:
            async for trajectory in trajectories:
                if isinstance(trajectory, Trajectory):
                    return trajectory
        raise stopping()

    @router.get("/agents")
    async def list_agents() -> AgentList:
        """The agent loops that `agent_name` can select."""
        return AgentList(
            agents=agents(),
            without_tools=context.chat_tokens.support.lacks if context.chat_tokens else "",
            teachers=context.settings.teachers,
        )

    return router


class _RoutedCalls(Collector):
    """Calls that a full replica passed on to the next one, by service, and turns that left their replica."""

    def __init__(self, context: AgentContext) -> None:
        self._rollout = context.rollout
        self._clients = {"rollout": context.rollout, "tools": context.tools, "reward": context.reward}

    def collect(self) -> Iterator[Metric]:
        description = "Calls that a full replica of the service passed on to the next one"
        spilled = CounterMetricFamily("trackway_spilled_calls", description, labels=["service"])
        for service, client in self._clients.items():
            spilled.add_metric([service], client.spilled)
        yield spilled
        description = "Turns on another rollout replica than their trajectory's turn before"
        yield CounterMetricFamily("trackway_moved_turns", description, value=self._rollout.moved)


async def _lines(trajectories: AsyncGenerator[Trajectory | GroupWaits, None]) -> AsyncGenerator[str, None]:
    """One trajectory per line; closing the generator aborts the remaining rollouts."""
    async with aclosing(trajectories):
        async for trajectory in trajectories:
            yield trajectory.model_dump_json() + "\n"
