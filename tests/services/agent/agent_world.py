"""What the agent's tests run in: a scripted model behind the rollout API, the real tools and reward services."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI, Header
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.reward.app import create_app as create_reward
from trackway.tools.app import create_app as create_tools
from trackway.tools.base import BaseTool, ToolInputError
from trackway.tools.calculator import CalculatorTool
from trackway.tools.gsm8k import Gsm8kTool
from trackway.tracing import Tracing, TracingSettings
from trackway.wire.agent import GroupRequest
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.rollout import ChoiceLogprobs, GenerateChoice, GenerateReply, GenerateRequest, TokenLogprob, Usage
from trackway.wire.tools import ToolResult
from trackway.wire.trajectory import Trajectory, WeightSpan

END = "<|im_end|>"

CHATML = """{%- if tools %}<|im_start|>system
Tools: {{ tools | map(attribute="function") | map(attribute="name") | join(", ") }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN = """{%- if tools %}<|im_start|>system
You are Qwen.

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}
{{- "<|im_start|>user" }}{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or loop.nextitem.role != "tool" %}
{{- "<|im_end|>\\n" }}{%- endif %}{%- elif message.role == "assistant" and loop.last %}
{{- "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" + message.content + "<|im_end|>\\n" }}{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, ChatML's two special tokens, and the two ordinary ones around a tool call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    core.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


Words = str | Callable[[], Awaitable[str]]
"""What the model says in one turn, or something to wait for that gives it."""


class ScriptedModel:
    """Stands for the model, which cannot be told what to say: answers each turn of a trajectory from a script."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.scripts: dict[int, list[Words]] = {}
        """Words by rollout_n, turn by turn."""
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.finish_reason: str | None = None
        self.obeys = True
        """Whether it keeps to `max_tokens` and gives a logprob for each token."""
        self.app = FastAPI()
        self.app.post("/generate")(self.generate)

    def seen(self, rollout_n: int = 0) -> list[GenerateRequest]:
        """Requests of one rollout, in order."""
        return [request for session, request in self.requests if session.endswith(f"/{rollout_n}")]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def generate(self, request: GenerateRequest, x_session_id: str = Header()) -> GenerateReply:
        """The k-th token of turn t has logprob -(k + 1) / 8 and comes from weights 3 + t."""
        self.requests.append((x_session_id, request))
        rollout_n = int(x_session_id.rsplit("/", 1)[1])
        turn = len(self.seen(rollout_n)) - 1
        words = self.scripts[rollout_n][turn]
        said = self.encode(words if isinstance(words, str) else await words())
        ids = said[: request.sampling_params.max_tokens]
        reason = self.finish_reason or (
            "length" if len(ids) < len(said) or ids[-1:] != self.encode("<|im_end|>") else "stop"
        )
        logprobs = [TokenLogprob(token_id=token, logprob=-(place + 1) / 8) for place, token in enumerate(ids)]
        if not self.obeys:
            logprobs.pop()
        choice = GenerateChoice(
            finish_reason=reason,  # pyright: ignore[reportArgumentType]
            token_ids=ids,
            logprobs=ChoiceLogprobs(content=logprobs),
            weight_versions=[WeightSpan(version=3 + turn, start=0, end=len(ids))],
        )
        usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=len(ids), total_tokens=0)
        return GenerateReply(request_id="r", model="scripted", created=0, usage=usage, choices=[choice])


def schema(name: str) -> ToolSchema:
    flags: dict[str, JsonValue] = {"refuse": {"type": "boolean"}, "raise": {"type": "boolean"}}
    return ToolSchema(function=FunctionSchema(name=name, parameters={"type": "object", "properties": flags}))


class Counter(BaseTool):
    """Counts its calls; the count is its reward. Knows who released it."""

    def __init__(self, name: str = "counter") -> None:
        super().__init__({}, schema(name))
        self.counts: dict[str, int] = {}
        self.released: list[str] = []
        self.before: Callable[[], Awaitable[object]] | None = None
        self.text: str | None = None

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        self.counts[instance_id] = 0

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        if self.before is not None:
            await self.before()
        self.counts[instance_id] += 1
        if arguments.get("refuse"):
            raise ToolInputError("expected no refuse, got one")
        if arguments.get("raise"):
            raise RuntimeError("out of order")
        return ToolResult(text=self.text or f"count {self.counts[instance_id]}", reward=0.25)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, /) -> None:
        self.released.append(instance_id)


class Replaceable(httpx.AsyncBaseTransport):
    """A service that can be taken down or replaced by a fresh process while the agent runs."""

    def __init__(self, app: FastAPI) -> None:
        self.app: FastAPI | None = app
        self.paths: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.app is None:
            raise httpx.ConnectError("connection refused")
        self.paths.append(f"{request.method} {request.url.path.split('/')[-1]}")
        return await httpx.ASGITransport(app=self.app).handle_async_request(request)


@dataclass
class World:
    """The agent app and everything around it."""

    agent: FastAPI
    model: ScriptedModel
    counter: Counter
    other: Counter
    tools: Replaceable
    reward: Replaceable
    client: httpx.AsyncClient
    exporter: InMemorySpanExporter
    tracings: list[Tracing] = field(default_factory=list)

    def new_tool_server(self) -> None:
        """The tool server's replica is lost; another one answers from now on."""
        self.counter = Counter()
        self.tools.app = create_tools(tools=[self.counter, self.other])

    async def run(self, request: GroupRequest) -> list[Trajectory]:
        """A whole group, ordered by rollout number."""
        response = await self.client.post("/groups", json=request.model_dump(mode="json"))
        assert response.status_code == 200, response.text
        trajectories = [Trajectory.model_validate_json(line) for line in response.text.splitlines()]
        return sorted(trajectories, key=lambda one: one.tags.rollout_n)

    async def say(self, *turns: Words, **changes: Any) -> Trajectory:
        """One trajectory in which the model says this."""
        self.model.scripts[0] = list(turns)
        [trajectory] = await self.run(group(**changes))
        return trajectory

    def spans(self) -> list[ReadableSpan]:
        """Every recorded span so far."""
        for tracing in self.tracings:
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


async def until(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def open_world(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[World]:
    exporter = InMemorySpanExporter()
    tracings = [
        Tracing(name, TracingSettings(schedule_delay_s=0.05), exporter) for name in ("agent", "tools", "reward")
    ]
    model, counter, other = ScriptedModel(tokenizer), Counter(), Counter("other")
    offered = [counter, other, CalculatorTool.default(), Gsm8kTool.default()]
    tools = Replaceable(create_tools(tools=offered, tracing=tracings[1]))
    reward = Replaceable(create_reward(tracing=tracings[2]))
    mounts = {"http://rollout": httpx.ASGITransport(model.app), "http://tools": tools, "http://reward": reward}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(mounts=mounts))
        agent = create_agent(settings, http, tracings[0])
        for app in (tools.app, reward.app, agent):
            assert app is not None
            await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(agent)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://agent"))
        yield World(agent, model, counter, other, tools, reward, client, exporter, tracings)
