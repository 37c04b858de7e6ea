"""The agent loop: what happens between the model's turns. Rows select it with `agent_name`."""

from trackway.agent import Episode, ToolAgent, Toolbox, register
from trackway.tracing import turn_span
from trackway.wire.trajectory import StopReason

MAX_TURNS = 3
REMINDER = "Write the answer after ####."


@register("my_agent")
class MyAgent(ToolAgent):
    """Calls tools, and reminds the model of the format when it answers without ####."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Generate, then run the calls or send the reminder, until an answer has the format."""
        tools = await self.services.catalog.offered(episode.request)
        await self.begin(episode, tools.schemas)
        for turn in range(MAX_TURNS):
            with turn_span(turn):
                written = await self.take_turn(episode)
                if "####" in written.content:
                    return StopReason.ANSWERED
                if written.calls:
                    has_room = await self.answer_calls(episode, toolbox, written, tools)
                else:
                    has_room = await self.tell(episode, REMINDER)
                if not has_room:
                    return StopReason.MAX_RESPONSE
        return StopReason.MAX_TURNS
