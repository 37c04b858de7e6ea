"""A scripted agent service over a real socket, and the rows it is asked about."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from tests.serving import served_in_thread
from trackway.clients import close_shared_http
from trackway.run_config import RunConfig
from trackway.serving.app import process_health
from trackway.tracing import (
    Tracing,
    TracingSettings,
    chat_span,
    extracted,
    inject,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.span_handle import activated
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import AgentInfo, AgentList, GroupRequest, GroupWaits
from trackway.wire.rollout import SamplingParams
from trackway.wire.service import Health, Ready, Wait
from trackway.wire.trajectory import (
    Reward,
    StopReason,
    Tags,
    TraceBackend,
    TraceTarget,
    Trajectory,
    WeightSpan,
    trajectory_id,
)


class Serving(Protocol):
    """Serves an app on a port, a free one by default, and gives its URL."""

    def __call__(self, app: FastAPI, port: int = 0) -> AbstractContextManager[str]: ...


def scripted_trajectory(request: GroupRequest, rollout_n: int) -> Trajectory:
    """A rollout whose tokens and reward follow from its place alone."""
    tags = request.tags(rollout_n)
    index = request.sample.index
    row = index if isinstance(index, int) else len(index)
    ids = [3 + (request.step + row + rollout_n + place) % 20 for place in range(4)]
    return Trajectory(
        id=trajectory_id(request.run, tags),
        session_id="session",
        tags=tags,
        agent_name=request.sample.agent_name or "",
        data_source=request.sample.data_source,
        prompt_ids=[1, 2, 3],
        response_ids=ids,
        response_mask=[1, 1, 0, 1],
        response_logprobs=[-3.0, -3.0, 0.0, -3.0],
        weight_versions=[WeightSpan(version=request.min_weight_version, start=0, end=4)],
        reward=Reward(score=float(rollout_n % 2), components={"acc": float(rollout_n % 2)}),
        num_turns=2,
        stop_reason=StopReason.ANSWERED,
        trace_id=f"{request.step:016x}{request.sample.index:08x}{rollout_n:08x}" if request.trace else None,
    )


@dataclass
class ScriptedAgent:
    """An agent service that answers at once, unless told to break or to wait."""

    breaks: list[int] = field(default_factory=list)
    """The next streams break after this many lines."""
    holding_at: int | None = None
    """Groups of this step and later wait until `released`."""
    late_s: float = 0.0
    """Groups of every second row are answered so much later."""
    requests: list[GroupRequest] = field(default_factory=list)
    agents: Sequence[str] = ("single_turn_agent", "tool_agent")
    """The agent loops that it says it has."""
    tracing: Tracing | None = None
    """With one it makes real spans; without, a trace id that nobody knows."""
    waits: list[Wait] = field(default_factory=list[Wait])
    """What it says that its rollouts wait for."""
    clock_ahead_s: float = 0.0
    released: threading.Event = field(default_factory=threading.Event)
    change: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory
    """What becomes of each trajectory before it is sent."""

    def app(self) -> FastAPI:
        """The service."""
        app = FastAPI()

        @app.post("/groups")
        async def groups(request: GroupRequest, http: Request) -> StreamingResponse:
            self.requests.append(request)
            return StreamingResponse(self._lines(request, http, self.breaks.pop(0) if self.breaks else None))

        @app.get("/agents")
        async def agents() -> AgentList:
            return AgentList(agents=[AgentInfo(name=name, description="") for name in self.agents])

        @app.get("/health")
        async def health() -> Health:
            return process_health("agent", "scripted", self.tracing)

        @app.get("/ready")
        async def ready() -> Ready:
            return Ready(ready=True)

        return app

    async def _lines(self, request: GroupRequest, http: Request, breaks_after: int | None) -> AsyncIterator[str]:
        held = self.holding_at is not None and request.step >= self.holding_at
        if self.waits and request.report_waits_s is not None:
            now = round((time.time() + self.clock_ahead_s) * 1000)
            yield GroupWaits(waits=self.waits, now=now).model_dump_json() + "\n"
        while held and not self.released.is_set():
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.late_s * (int(request.sample.index) % 2))
        for sent, rollout_n in enumerate(request.rollout_numbers()):
            if sent == breaks_after:
                raise ConnectionResetError("scripted break")
            yield self.change(self._trajectory(request, rollout_n, http)).model_dump_json() + "\n"

    def _trajectory(self, request: GroupRequest, rollout_n: int, http: Request) -> Trajectory:
        made = scripted_trajectory(request, rollout_n)
        if self.tracing is None:
            return made
        with (
            activated(self.tracing),
            extracted(http.headers),
            trajectory_span(made.tags, made.id, "a", [], request.trace, request.trace_target) as root,
        ):
            with turn_span(0), tool_span("calculator", {"expression": "1+1"}, None) as tool:
                tool.outputs({"text": "2"})
            set_outcome(root)
        trace = {"trace_id": root.trace_id, "span_id": root.span_id, "trace_bytes": root.trace_stats.bytes}
        return made.model_copy(update=trace)


class TracedServices:
    """Agent, rollout and tools, each with a tracing of its own as in a process of its own."""

    def __init__(self, uri: str, experiment_id: str, run_id: str | None = None, delay_s: float = 0.1) -> None:
        self._target = TraceTarget(
            backends=(TraceBackend.MLFLOW,), mlflow_experiment_id=experiment_id, mlflow_run_id=run_id
        )
        settings = TracingSettings(mlflow_uri=uri, schedule_delay_s=delay_s)
        self._all = {name: Tracing(name, settings) for name in ("agent", "rollout", "tools")}

    def trajectory(self, step: int, rollout_n: int) -> Trajectory:
        """One trajectory over three services, whose spans arrive in requests of their own, the tool's first."""
        tags = Tags(experiment_name="run", step=step, sample_index=0, rollout_n=rollout_n)
        name = trajectory_id("run", tags)
        headers: dict[str, str] = {}
        with (
            activated(self._all["agent"]),
            trajectory_span(tags, name, "a", [], True, self._target) as root,
            turn_span(0),
        ):
            inject(headers)
            with activated(self._all["tools"]), extracted(headers), tool_span("calculator", {}, None):
                pass
            with activated(self._all["rollout"]), extracted(headers), chat_span("tiny", SamplingParams()):
                pass
        return Trajectory(
            id=name,
            session_id="session",
            tags=tags,
            agent_name="tool_agent",
            data_source="openai/gsm8k",
            reward=Reward(score=1.0),
            stop_reason=StopReason.ANSWERED,
            trace_id=root.trace_id,
            span_id=root.span_id,
        )

    def close(self) -> None:
        """Send everything."""
        for tracing in self._all.values():
            assert tracing.shutdown(60.0)


@pytest.fixture
def traced_services() -> type[TracedServices]:
    """Makes services that export to an MLflow server."""
    return TracedServices


@pytest.fixture
def scripted() -> Callable[[GroupRequest, int], Trajectory]:
    """The trajectory that the scripted agent gives for a request's rollout."""
    return scripted_trajectory


@pytest.fixture(scope="session")
def new_agent() -> Callable[..., ScriptedAgent]:
    """Makes a scripted agent."""
    return ScriptedAgent


@pytest.fixture
async def shared_http() -> AsyncIterator[None]:
    """Closes the process's shared HTTP client after a test that makes clients of its own."""
    yield
    await close_shared_http()


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def agent_url(agent: ScriptedAgent, serving: Serving) -> Iterator[str]:
    """The scripted agent's URL."""
    with serving(agent.app()) as url:
        yield url
        agent.released.set()


@pytest.fixture(scope="session")
def serving() -> Serving:
    """`with serving(app) as url`: the app on a free port, in a thread."""

    return served_in_thread


@pytest.fixture
def urls() -> ServiceUrls:
    """Of services that nobody asks."""
    return ServiceUrls(agent_url="http://agent", tools_url="http://tools", weights_url="/weights")


@pytest.fixture
def folder(tmp_path: Path, urls: ServiceUrls) -> RunFolder:
    """Of a run that is starting."""
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig(), urls)
    return folder
