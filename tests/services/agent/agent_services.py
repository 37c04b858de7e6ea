"""What the agent's tests run in: the four real services, around an engine that says what a script tells."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from tests.services.agent.replaceable import ModelLine, Replaceable
from tests.services.agent.scripted_model import ScriptedModel, Words
from tests.weight_proofs import ANY_PROOF
from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.clients.weights import WeightStore
from trackway.reward.app import create_app as create_reward
from trackway.rollout.app import create_app as create_rollout
from trackway.rollout.settings import RolloutSettings
from trackway.tools.app import create_app as create_tools
from trackway.tools.base import BaseTool, ToolInputError
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.settings import ToolsSettings
from trackway.tracing import Tracing, TracingSettings
from trackway.tracing.settings import Redact
from trackway.wire.agent import GroupRequest
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult
from trackway.wire.trajectory import Trajectory


def schema(name: str) -> ToolSchema:
    flags: dict[str, JsonValue] = {"refuse": {"type": "boolean"}, "raise": {"type": "boolean"}, "note": {}}
    return ToolSchema(function=FunctionSchema(name=name, parameters={"type": "object", "properties": flags}))


class Counter(BaseTool):
    """Counts its calls; the count is its reward. Knows who released it."""

    def __init__(self, name: str = "counter") -> None:
        super().__init__({}, schema(name))
        self.counts: dict[str, int] = {}
        self.released: list[str] = []
        self.before: Callable[[], Awaitable[object]] | None = None
        self.text: str | None = None
        self.metrics: dict[str, float] = {}
        self.given: list[dict[str, JsonValue]] = []
        """The kwargs of every stage that was given some."""

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        self.given += [create_kwargs] if create_kwargs else []
        self.counts[instance_id] = 0

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        self.given += [execute_kwargs] if execute_kwargs else []
        if self.before is not None:
            await self.before()
        self.counts[instance_id] += 1
        if arguments.get("refuse"):
            raise ToolInputError("expected no refuse, got one")
        if arguments.get("raise"):
            raise RuntimeError("out of order")
        return ToolResult(text=self.text or f"count {self.counts[instance_id]}", reward=0.25, metrics=self.metrics)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        self.given += [kwargs] if kwargs else []
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        self.given += [release_kwargs] if release_kwargs else []
        self.released.append(instance_id)


@dataclass
class AgentServices:
    """The agent app and everything around it."""

    agent: FastAPI
    model: ScriptedModel
    counter: Counter
    other_tool: Counter
    rollout: Replaceable
    tools: Replaceable
    reward: Replaceable
    client: httpx.AsyncClient
    exporter: InMemorySpanExporter
    weights: WeightStore
    model_path: Path
    tracings: dict[str, Tracing] = field(default_factory=dict)

    def new_tool_server(self) -> None:
        """The tool server's replica is lost; another one answers from now on."""
        self.counter = Counter()
        self.tools.app = create_tools(tools=[self.counter, self.other_tool], tracing=self.tracings["tools"])

    def slow_tool_server(self, call_timeout_s: float) -> None:
        """A tool server whose counter never ends a call, but is cut off after `call_timeout_s`."""
        self.counter.before = asyncio.Event().wait
        settings = ToolsSettings(call_timeout_s=call_timeout_s)
        self.tools.app = create_tools(settings, tools=[self.counter], tracing=self.tracings["tools"])

    def publish_weights(self, version: int) -> None:
        """The trainer publishes; the rollout service looks when a request wants them."""
        self.weights.publish(version, "run-a", self.model_path, ANY_PROOF)

    async def run(self, request: GroupRequest) -> list[Trajectory]:
        """A whole group, ordered by rollout number."""
        response = await self.client.post("/groups", json=request.model_dump(mode="json"))
        assert response.status_code == 200, response.text
        trajectories = [Trajectory.model_validate_json(line) for line in response.text.splitlines()]
        return sorted(trajectories, key=lambda trajectory: trajectory.tags.rollout_n)

    async def say(self, *turns: Words, **changes: Any) -> Trajectory:
        """One trajectory in which the model says this."""
        self.model.scripts[0] = list(turns)
        [trajectory] = await self.run(group(**changes))
        return trajectory

    def spans(self) -> list[ReadableSpan]:
        """Every recorded span so far."""
        for tracing in self.tracings.values():
            assert tracing.flush(5.0)
        return list(self.exporter.get_finished_spans())


def group(agent_name: str | None = "tool_agent", truth: str = "18", **changes: Any) -> GroupRequest:
    """A request in the shape of a GSM8K row; changes are fields of the request or, dotted by `__`, of its parts."""
    body: dict[str, Any] = {
        "run": "run-a",
        "experiment_name": "exp",
        "step": 1,
        "sample": {
            "data_source": "openai/gsm8k",
            "agent_name": agent_name,
            "prompt": [{"role": "user", "content": "9+9?"}],
            "reward_model": {"ground_truth": truth},
            "extra_info": {
                "index": 7,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
            },
        },
        "sampling_params": {"max_tokens": 4096},
        "limits": {"max_prompt_length": 2048, "max_response_length": 4096},
    }
    for name, value in changes.items():
        place = body
        *parents, last = name.split("__")
        for parent in parents:
            place = place[parent]
        place[last] = value
    return GroupRequest.model_validate(body)


def call(name: str, arguments: str = "{}") -> str:
    """A Hermes tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SERVICES = ("agent", "rollout", "tools", "reward")


@asynccontextmanager
async def open_services(
    settings: AgentSettings,
    tokenizer: PreTrainedTokenizerFast,
    redact: Redact | None = None,
    tracing: TracingSettings | None = None,
    weight_wait_s: float = 5.0,
    trainer: FastAPI | None = None,
    teacher: httpx.AsyncBaseTransport | None = None,
) -> AsyncIterator[AgentServices]:
    """The services over ASGI, each with its own tracing into one exporter."""
    exporter = InMemorySpanExporter()
    tracing = tracing or TracingSettings(schedule_delay_s=0.05)
    tracings = {name: Tracing(name, tracing, exporter, redact) for name in SERVICES}
    model, counter, other_tool = ScriptedModel(tokenizer), Counter(), Counter("other")
    offered = [counter, other_tool, CalculatorTool.default(), Gsm8kTool.default()]
    async with AsyncExitStack() as stack:
        weights = stack.enter_context(tempfile.TemporaryDirectory())
        model_path = Path(settings.model_path)
        follows = RolloutSettings(
            model_path=model_path,
            model_name="tiny",
            weights_url=weights,
            weight_wait_s=weight_wait_s,
            weights_late_s=0.0,  # any wait is an incident
            watch_interval_s=60,  # it looks into the store only when a request wants a newer version
        )
        rollout = ModelLine(create_rollout(follows, model, tracings["rollout"]), model)
        tools = Replaceable(create_tools(tools=offered, tracing=tracings["tools"]))
        reward = Replaceable(create_reward(tracing=tracings["reward"]))
        mounts: dict[str, httpx.AsyncBaseTransport | None] = {
            "http://rollout": rollout,
            "http://tools": tools,
            "http://reward": reward,
        }
        if teacher is not None:
            mounts["http://teacher"] = teacher
        if trainer is not None:
            mounts["http://trainer"] = httpx.ASGITransport(trainer)
        # No TLS here: reading the certificates takes 40 ms.
        http = await stack.enter_async_context(httpx.AsyncClient(mounts=mounts, verify=False))
        agent = create_agent(settings, http, tracings["agent"])
        for app in (rollout.app, tools.app, reward.app, agent):
            assert app is not None
            await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(agent)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://agent"))
        store = WeightStore(weights)
        yield AgentServices(
            agent, model, counter, other_tool, rollout, tools, reward, client, exporter, store, model_path, tracings
        )
