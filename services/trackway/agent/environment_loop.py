"""The agent loop of an environment, `agent_name: environment:NAME`: its tools, first observation, end and reward."""

import asyncio
from typing import ClassVar

from pydantic import JsonValue

from trackway.agent.environments import Environment, NemoGym, OpenEnv
from trackway.agent.episode import Episode, waits_for
from trackway.agent.loop import Stopwatch, register
from trackway.agent.settings import AgentSettings, EnvironmentSettings
from trackway.agent.tool_agent import ToolAgent
from trackway.agent.toolbox import Toolbox, ToolSet
from trackway.clients import Deadline
from trackway.tracing import add_event, tool_span
from trackway.tracing.spans import operation_span
from trackway.wire.errors import TrackwayError
from trackway.wire.tools import ExecuteRequest, ToolResult
from trackway.wire.trajectory import StopReason, require_trainable

_PROTOCOLS: dict[str, type[Environment]] = {"openenv": OpenEnv, "nemo_gym": NemoGym}


class EnvironmentAgent(ToolAgent):
    """The tool agent with the tools of an environment, which may end the trajectory and scores it."""

    environment_name: ClassVar[str]
    environment: ClassVar[EnvironmentSettings]
    slots: ClassVar[asyncio.Semaphore]
    """Episodes that may begin."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """One episode, once another may begin. Its connection is closed in any case."""
        with waits_for(f"a free slot of the environment {self.environment_name}", episode.deadline):
            await self.slots.acquire()
        try:
            protocol = _PROTOCOLS[self.environment.protocol]
            environment = protocol(self.environment_name, self.environment, episode.sample, episode.id)
            try:
                return await self._play(episode, toolbox, environment)
            finally:
                await environment.close()
        finally:
            self.slots.release()

    async def _play(self, episode: Episode, toolbox: Toolbox, environment: Environment) -> StopReason:
        episode.extend_prompt(await self._open(episode, environment))
        calls, deadline = asyncio.Lock(), episode.deadline
        for schema in environment.tools:
            toolbox.add(EnvironmentTool(schema.function.name, environment, calls, deadline))
        tools = ToolSet(environment.tools)
        await self.begin(episode, tools.schemas)
        stop = await self.take_turns(episode, toolbox, tools)
        if self.environment.scored_by == "environment":
            await self._take_reward(episode, toolbox, environment)
        return stop

    async def _open(self, episode: Episode, environment: Environment) -> str:
        deadline = episode.deadline.earlier(self.environment.open_timeout_s)
        with (
            operation_span(f"reset {self.environment_name}") as span,
            waits_for(f"the environment {self.environment_name}", deadline),
        ):
            span.inputs({**episode.sample.env_kwargs})
            observation = await environment.open(deadline)
            span.outputs({"observation": observation})
        return observation

    async def _take_reward(self, episode: Episode, toolbox: Toolbox, environment: Environment) -> None:
        deadline = episode.deadline.earlier(self.environment.call_timeout_s)
        with (
            Stopwatch(episode.timings, "compute_score"),
            operation_span(f"score {self.environment_name}") as span,
            waits_for(f"the reward of the environment {self.environment_name}", deadline),
            environment.within(deadline, "to score the episode"),
        ):
            async with asyncio.timeout(deadline.remaining):
                reward = await environment.score(episode.turns)
                require_trainable(f"the reward of the environment {self.environment_name}", [reward.score])
                span.outputs({"score": reward.score, **reward.components, "state": await _state(environment)})
        tools = {f"tool/{name}": value for name, value in (await toolbox.rewards()).items()}
        episode.reward = reward.model_copy(update={"components": {**tools, **reward.components}})


class EnvironmentTool:
    """A tool of an environment. The calls of all its tools run one after another."""

    def __init__(self, tool: str, environment: Environment, call_lock: asyncio.Lock, deadline: Deadline) -> None:
        self.tool = tool
        self.call_lock = call_lock
        self._environment = environment
        self._deadline = deadline
        self._reward = 0.0

    async def execute(self, request: ExecuteRequest) -> ToolResult:
        """Run one call."""
        with tool_span(self.tool, request.arguments, request.tool_call_id) as span:
            deadline = self._deadline.earlier(self._environment.settings.call_timeout_s)
            step = await self._environment.answer(self.tool, request.arguments, deadline)
            require_trainable(f"the reward of {self.tool}", [step.reward])
            span.outputs({"text": step.text, "reward": step.reward})
        self._reward += step.reward
        return ToolResult(text=step.text, reward=step.reward)

    @property
    def done(self) -> bool:
        """Return whether a call has ended the episode."""
        return self._environment.done

    async def reward(self) -> float:
        """The sum over its calls."""
        return self._reward

    async def release(self, deadline: Deadline) -> None:
        """Nothing: the loop closes the environment."""


async def _state(environment: Environment) -> dict[str, JsonValue]:
    """The environment's state. An episode that has ended well may be gone."""
    try:
        return await environment.state()
    except TrackwayError as error:
        add_event("state_unavailable", reason=error.message)
        return {}


def register_environments(settings: AgentSettings) -> None:
    """Register the loop of each environment of the setting `environments` as `environment:NAME`."""
    for name, environment in settings.environments.items():
        description = f"Environment {name!r} ({environment.protocol}) of the setting `environments`."
        slots = asyncio.Semaphore(environment.max_open)
        members = {"environment_name": name, "environment": environment, "slots": slots, "__doc__": description}
        register(f"environment:{name}")(type("EnvironmentAgent", (EnvironmentAgent,), members))
