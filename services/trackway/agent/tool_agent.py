"""verl's tool agent: generate, run the calls, append the observations, until the model answers; and its variants.

States in verl's words (verl/experimental/agent_loop/tool_agent_loop.py): PENDING is `begin`, then GENERATING and
PROCESSING_TOOLS take turns until TERMINATED.

`single_turn_agent` has no tools. `environment:NAME` has the tools of an environment, which may end the trajectory and
scores it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import JsonValue

from trackway.agent.environments import Environment, NemoGym, OpenEnv
from trackway.agent.episode import Episode, waits_for
from trackway.agent.loop import AgentLoop, Stopwatch, assistant_message, call_id, register, with_ids
from trackway.agent.settings import AgentSettings, EnvironmentSettings
from trackway.agent.toolbox import Observation, Toolbox, ToolSet, rejected, truncated
from trackway.chat.tool_calls import Parsed, ParsedCall
from trackway.clients import Deadline
from trackway.tracing import add_event, tool_span, turn_span
from trackway.tracing.spans import operation_span
from trackway.wire.agent import Limits
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.tools import ExecuteRequest, ToolResult
from trackway.wire.trajectory import StopReason, Turn, require_trainable


@register("tool_agent")
class ToolAgent(AgentLoop):
    """Multi-turn: calls tools until the model answers without a call or a limit is reached."""

    offers_tools = True
    speaks_messages = True

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Offer the tool server's tools, and take turns."""
        tools = await self.services.catalog.offered(episode.request)
        await self.begin(episode, tools.schemas)
        return await self.take_turns(episode, toolbox, tools)

    async def take_turns(self, episode: Episode, toolbox: Toolbox, tools: ToolSet) -> StopReason:
        """Generate, run tools, repeat."""
        while True:
            with turn_span(len(episode.turns)) as span:
                parsed = await self.take_turn(episode)
                stop = reason_to_stop(episode, parsed, tools)
                if stop is not None:
                    return stop
                has_room = await self.answer_calls(episode, toolbox, parsed, tools)
                span.outputs(_outcome(episode.turns[-1], len(parsed.calls)))
                if toolbox.done:
                    return StopReason.ENVIRONMENT_DONE
                if not has_room:
                    return StopReason.MAX_RESPONSE

    async def take_turn(self, episode: Episode) -> Parsed:
        """Generate one assistant turn, append it to `episode.turns`, and return its text and tool calls."""
        start, spent = len(episode.response_ids), episode.timings.generate_sequences
        if self.services.chat is not None:
            parsed, finish_reason, *_ = await self.ask(episode, self.services.chat)
        else:
            finish_reason = await self.generate(episode)
            tokens = self.services.tokens
            text = await tokens.turn_text(episode.response_ids[start:])
            parsed = tokens.tool_format.parse(text, episode.parameters)
            if parsed.unclosed is not None:
                parsed = _with_unclosed(parsed, parsed.unclosed, is_cut=finish_reason == "length")
        index = len(episode.turns)
        episode.turns.append(
            Turn(
                index=index,
                messages=[assistant_message(parsed, index)],
                response_start=start,
                response_end=len(episode.response_ids),
                finish_reason=finish_reason,
                generate_s=episode.timings.generate_sequences - spent,
            )
        )
        return parsed

    async def answer_calls(self, episode: Episode, toolbox: Toolbox, parsed: Parsed, tools: ToolSet) -> bool:
        """Run the calls of the last turn and append an observation for each. False when the response is full.

        Raises TrackwayError for a fault of the infrastructure. A call that fails becomes its observation.
        """
        calls = with_ids(parsed, episode.turns[-1].index)
        observations = await self._run_tools(episode, toolbox, calls, tools)
        return await self._observe(episode, calls, observations)

    async def tell(self, episode: Episode, text: str) -> bool:
        """Append a text that the model reads before its next turn, in the role of a tool. False when the response is
        full."""
        message = Message(role="tool", content=text)
        shown = message.model_copy(
            update={"tool_call_id": call_id(episode.turns[-1].index, 0)}
        )  # some templates want one
        ids = await self._ids(episode, [shown])
        return episode.add_observation(ids, [message])

    async def _run_tools(
        self, episode: Episode, toolbox: Toolbox, calls: Mapping[str, ParsedCall], tools: ToolSet
    ) -> list[Observation]:
        turn, earlier, spent = episode.turns[-1], len(toolbox.records), episode.timings.tool_calls
        try:
            with Stopwatch(episode.timings, "tool_calls"):
                observations = await toolbox.answer(calls, tools, episode.limits.max_parallel_calls)
        finally:
            turn.calls, turn.tools_s = toolbox.records[earlier:], episode.timings.tool_calls - spent
        turn.calls_executed = sum(seen.record is not None for seen in observations)
        episode.tool_rewards += [seen.reward for seen in observations if seen.reward is not None]
        return observations

    async def _observe(
        self, episode: Episode, calls: Mapping[str, ParsedCall], observations: Sequence[Observation]
    ) -> bool:
        """Append the observations. Returns False when the response has no room for them."""
        texts = [await self._shown(seen, episode.limits) for seen in observations]
        messages = [
            Message(role="tool", content=text, tool_call_id=named, name=call.name or None)
            for text, (named, call) in zip(texts, calls.items(), strict=True)
        ]
        return episode.add_observation(await self._ids(episode, messages), messages)

    async def _ids(self, episode: Episode, messages: Sequence[Message]) -> list[int]:
        """The observation's ids; none for a model that speaks messages."""
        if self.services.chat is not None:
            return []
        return await self.services.tokens.observation(messages, episode.response_ids)

    async def _shown(self, seen: Observation, limits: Limits) -> str:
        """The observation, truncated to the limits."""
        counts_tokens = limits.max_tool_response_tokens is not None
        text = truncated(seen.text, limits, await self.services.tokens.places(seen.text) if counts_tokens else ())
        if seen.record is not None:
            seen.record.truncated = text != seen.text
        return text


def reason_to_stop(episode: Episode, parsed: Parsed, tools: ToolSet) -> StopReason | None:
    """The stop reason after a turn, by verl's rules and `on_bad_call`. None to run the tools."""
    turn = episode.turns[-1]
    max_turns, max_rounds = episode.limits.max_assistant_turns, episode.limits.max_user_turns
    if turn.finish_reason == "length" and (parsed.unclosed is not None or not parsed.calls):
        return StopReason.MAX_RESPONSE
    if not parsed.calls:
        return StopReason.ANSWERED
    if episode.room <= 0:
        return StopReason.MAX_RESPONSE
    if max_turns is not None and len(episode.turns) >= max_turns:
        return StopReason.MAX_TURNS
    if max_rounds is not None and episode.user_turns >= max_rounds:
        return StopReason.MAX_TURNS
    if episode.limits.on_bad_call == "end" and any(rejected(call, tools) is not None for call in parsed.calls):
        return StopReason.BAD_CALL
    return None


def _with_unclosed(parsed: Parsed, unclosed: ParsedCall, *, is_cut: bool) -> Parsed:
    """A call cut by the limit is text. The model itself left another one open: a malformed call."""
    if not is_cut:
        return parsed._replace(calls=[*parsed.calls, unclosed])
    add_event("unclosed_call", tool=unclosed.name)
    return parsed._replace(content="\n".join(filter(None, (parsed.content, unclosed.raw))))


def _outcome(turn: Turn, asked: int) -> dict[str, JsonValue]:
    """The outcome of the turn's calls, for its span."""
    errors: list[JsonValue] = [call.error.value for call in turn.calls if call.error is not None]
    return {"calls": asked, "calls_executed": turn.calls_executed, "errors": errors}


@register("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """Single-turn: answers the prompt once, without tools."""

    speaks_messages = True

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Generate once."""
        await self.begin(episode)
        with turn_span(0):
            if self.services.chat is not None:
                parsed, finish_reason, *_ = await self.ask(episode, self.services.chat)
                answer = parsed.content
            else:
                finish_reason = await self.generate(episode)
                answer = await self.services.tokens.turn_text(episode.response_ids)
        episode.turns.append(
            Turn(
                index=0,
                messages=[Message(role="assistant", content=answer)],
                response_start=0,
                response_end=len(episode.response_ids),
                finish_reason=finish_reason,
                generate_s=episode.timings.generate_sequences,
            )
        )
        return StopReason.MAX_RESPONSE if finish_reason == "length" else StopReason.ANSWERED


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
