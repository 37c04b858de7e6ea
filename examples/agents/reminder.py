"""An agent loop and a scorer of your own; docs/start/your-own-agent.md runs them."""

from trackway.agent import AgentLoop, Episode, Toolbox, register
from trackway.scoring import gsm8k
from trackway.tracing import turn_span
from trackway.wire.chat import Message
from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward, StopReason, Turn

MAX_TURNS = 4
REMINDER = "Write the answer after ####."


@register("reminder_agent")
class ReminderAgent(AgentLoop):
    """Calls tools, and reminds the model of the format when it answers without ####."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Generate, then run the calls or send the reminder, until an answer has the format."""
        offer = await self.services.catalog.offered(episode.request)
        await self.begin(episode, offer.schemas)
        for turn in range(MAX_TURNS):
            with turn_span(turn):
                text = await self._take_turn(episode, turn)
                if "####" in text:
                    return StopReason.ANSWERED
                parsed = self.services.parser.parse(text)
                calls = {f"call_{turn}_{number}": call for number, call in enumerate(parsed.calls)}
                results = await toolbox.answer(calls, offer, episode.limits.max_parallel_calls)
                observations = [result.text for result in results] or [REMINDER]
                ids = await self.services.tokens.observation(observations, episode.response_ids)
                if not episode.add_observation(ids, [Message(role="tool", content=text) for text in observations]):
                    return StopReason.MAX_RESPONSE
        return StopReason.MAX_TURNS

    async def _take_turn(self, episode: Episode, turn: int) -> str:
        start = len(episode.response_ids)
        finish_reason = await self.generate(episode)
        text = await self.services.tokens.turn_text(episode.response_ids[start:])
        episode.turns.append(
            Turn(
                index=turn,
                messages=[Message(role="assistant", content=text)],
                response_start=start,
                response_end=len(episode.response_ids),
                finish_reason=finish_reason,
            )
        )
        return text


class CarefulScorer:
    """A right answer scores 1; each failed tool call costs 0.1."""

    info = ScorerInfo(name="careful", data_sources=["me/sums"], methods=["strict"], description="Right and careful.")

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """The score, and its parts as components."""
        correct = gsm8k.score(request.solution_str, request.ground_truth, gsm8k.Method.STRICT)
        calls = request.extra_info.get("tool_calls")
        records = calls if isinstance(calls, list) else []
        failed = float(sum(isinstance(record, dict) and record["error"] is not None for record in records))
        return Reward(score=correct - 0.1 * failed, components={"correct": correct, "failed_calls": failed})
