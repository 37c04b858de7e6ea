"""The reward service without HTTP: selects scorer and method, scores in a span, within a deadline."""

import asyncio
import logging
import math
from collections.abc import Sequence

from trackway.reward.scorers import Scorer, ScorerRegistry, method_of
from trackway.serving.user_code import located, run_user_code
from trackway.tracing import SpanHandle, reward_span, token2text
from trackway.tracing.active import active_tracing
from trackway.tracing.redaction import redacted
from trackway.tracing.span_handle import utf8_size
from trackway.wire.base import well_formed
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import MAX_COMPONENTS, Reward

logger = logging.getLogger("trackway.reward")

SHOWN_CHARS = 300
"""Characters at the end of a solution that a span records: they contain the answer."""


class RewardService:
    """Scores solutions. Every method raises TrackwayError.

    timeout_s: limit of one score in seconds.
    """

    def __init__(self, scorers: Sequence[Scorer], timeout_s: float) -> None:
        self._registry = ScorerRegistry(scorers)
        self._timeout_s = timeout_s

    def infos(self) -> list[ScorerInfo]:
        """Every scorer."""
        return self._registry.infos()

    async def score(self, request: ScoreRequest) -> Reward:
        """Score one solution, in a span of its own."""
        scorer = self._registry.get(request.data_source)
        method = method_of(scorer, request.method)
        with reward_span(scorer.info.name) as span:
            _show_inputs(span, method, request)
            reward = await self._within_deadline(scorer, method, request)
            span.score(reward.score)
            turns = {"turn_scores": reward.turn_scores} if reward.turn_scores else {}
            span.outputs({"score": reward.score, **turns, **reward.components})
        return reward

    async def _within_deadline(self, scorer: Scorer, method: str, request: ScoreRequest) -> Reward:
        name = scorer.info.name
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return _finite(await run_user_code(lambda: scorer.score(request, method)))
        except TrackwayError:
            raise
        except Exception as error:
            if deadline.expired():
                message = f"scorer {name!r}: expected a score within {self._timeout_s:g} s; raise score_timeout_s"
                raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
            # The traceback is logged here, since it does not cross the process.
            logger.exception("scorer %r failed", name)
            message = f"scorer {name!r} failed: {located(error)}; see the traceback in the reward service's log"
            raise TrackwayError(ErrorCode.INTERNAL, message) from error


def _show_inputs(span: SpanHandle, method: str, request: ScoreRequest) -> None:
    if span.recording:
        shown = {"data_source": request.data_source, "method": method, "ground_truth": request.ground_truth}
        text = {"solution_end": _end_of(request.solution_str)} if token2text() else {}
        span.inputs({**shown, **text})


def _end_of(text: str) -> str:
    """The end of a text, after a marker if it was truncated."""
    if len(text) <= SHOWN_CHARS:
        return text
    # Redact before truncating: half of a secret would not be recognised.
    tracing = active_tracing()
    text = redacted(text, tracing.redact if tracing else None)
    end = text[-SHOWN_CHARS:]
    missing = utf8_size(text) - utf8_size(end)
    return f"[truncated {missing} bytes]{end}" if missing else text


def _finite(reward: Reward) -> Reward:
    # Such a score is of no use for training, and the scorer's name is known here.
    if not all(math.isfinite(value) for value in (reward.score, *reward.components.values(), *reward.turn_scores)):
        raise ValueError(f"expected finite scores, got {reward}")
    if len(reward.components) > MAX_COMPONENTS:
        raise ValueError(f"expected at most {MAX_COMPONENTS} components, got {len(reward.components)}; return fewer")
    if all(map(str.isascii, reward.components)):
        return reward
    components = {well_formed(name): value for name, value in reward.components.items()}
    return reward.model_copy(update={"components": components})
