"""verl's single-turn agent: one prompt, one answer, no tools."""

from trackway.agent.episode import Episode
from trackway.agent.loop import AgentLoop, register
from trackway.agent.toolbox import Toolbox
from trackway.tracing import turn_span
from trackway.wire.chat import Message
from trackway.wire.trajectory import StopReason, Turn


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
