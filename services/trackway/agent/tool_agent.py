"""verl's tool agent: generate, run the calls, show the model what came back, until it answers.

States in verl's words (verl/experimental/agent_loop/tool_agent_loop.py): PENDING is `begin`, then GENERATING and
PROCESSING_TOOLS take turns until TERMINATED.
"""

from collections.abc import Mapping, Sequence

from trackway.agent.catalog import Offer
from trackway.agent.episode import Episode
from trackway.agent.loop import AgentLoop, register, stopwatch
from trackway.agent.observations import Observation, truncated
from trackway.agent.parser import Parsed
from trackway.agent.toolbox import Toolbox
from trackway.chat.tool_calls import ParsedCall
from trackway.tracing import turn_span
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.trajectory import StopReason, Turn


@register("tool_agent")
class ToolAgent(AgentLoop):
    """Multi-turn: calls the tools it is offered until it answers without a call or reaches a limit."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Generate, run tools, repeat."""
        offer = await self.services.catalog.offered(episode.request)
        await self.begin(episode, offer.schemas)
        while True:
            with turn_span(len(episode.turns)):
                parsed = await self._take_turn(episode)
                stop = reason_to_stop(episode, parsed)
                if stop is not None:
                    return stop
                calls = _with_ids(parsed, episode.turns[-1].index)
                observations = await self._run_tools(episode, toolbox, calls, offer)
                if not await self._observe(episode, calls, observations):
                    return StopReason.MAX_RESPONSE

    async def _take_turn(self, episode: Episode) -> Parsed:
        start, spent = len(episode.response_ids), episode.timings.generate_sequences
        finish_reason = await self.generate(episode)
        parsed = self.services.parser.parse(await self.services.tokens.turn_text(episode.response_ids[start:]))
        index = len(episode.turns)
        episode.turns.append(
            Turn(
                index=index,
                messages=[_assistant_message(parsed, index)],
                response_start=start,
                response_end=len(episode.response_ids),
                finish_reason=finish_reason,
                generate_s=episode.timings.generate_sequences - spent,
            )
        )
        return parsed

    async def _run_tools(
        self, episode: Episode, toolbox: Toolbox, calls: Mapping[str, ParsedCall], offer: Offer
    ) -> list[Observation]:
        spent = episode.timings.tool_calls
        with stopwatch(episode.timings, "tool_calls"):
            observations = await toolbox.answer(calls, offer, episode.limits.max_parallel_calls)
        episode.turns[-1].tools_s = episode.timings.tool_calls - spent
        episode.turns[-1].calls_executed = sum(seen.executed for seen in observations)
        episode.tool_rewards += [seen.reward for seen in observations if seen.reward is not None]
        return observations

    async def _observe(
        self, episode: Episode, calls: Mapping[str, ParsedCall], observations: Sequence[Observation]
    ) -> bool:
        """Append the observations; False when the response has no room for them."""
        texts = [truncated(seen.text, episode.limits) for seen in observations]
        messages = [
            Message(role="tool", content=text, tool_call_id=call_id, name=call.name or None)
            for text, (call_id, call) in zip(texts, calls.items(), strict=True)
        ]
        ids = await self.services.tokens.observation(texts, episode.response_ids)
        return episode.add_observation(ids, messages)


def reason_to_stop(episode: Episode, parsed: Parsed) -> StopReason | None:
    """Whether the turn just written is the last one: verl's rules; None goes on to the tools."""
    turn = episode.turns[-1]
    max_turns = episode.limits.max_assistant_turns
    if turn.finish_reason == "length" and (parsed.unclosed or not parsed.calls):
        return StopReason.MAX_RESPONSE
    if not parsed.calls:
        return StopReason.ANSWERED
    if episode.room <= 0:
        return StopReason.MAX_RESPONSE
    if max_turns is not None and len(episode.turns) >= max_turns:
        return StopReason.MAX_TURNS
    return None


def _with_ids(parsed: Parsed, turn: int) -> dict[str, ParsedCall]:
    return {f"call_{turn}_{place}": call for place, call in enumerate(parsed.calls)}


def _assistant_message(parsed: Parsed, turn: int) -> Message:
    calls = [
        ToolCall(id=call_id, function=FunctionCall(name=call.name, arguments=call.raw))
        for call_id, call in _with_ids(parsed, turn).items()
    ]
    return Message(role="assistant", content=parsed.content, tool_calls=calls or None)
