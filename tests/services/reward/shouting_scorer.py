"""A user's own scorer, loaded by import path: `tests.services.reward.shouting_scorer:ShoutingScorer`."""

import asyncio

from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward


class ShoutingScorer:
    """`share` is the share of capital letters; the other methods misbehave."""

    info = ScorerInfo(
        name="shouting",
        data_sources=["test/shouting"],
        methods=["share", "raise", "sleep", "nan", "many"],
        description="Share of capital letters.",
    )

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        if method == "raise":
            raise LookupError("asked to fail")
        if method == "sleep":
            await asyncio.Event().wait()
        if method == "many":
            return Reward(score=1.0, components={f"{number}": 1.0 for number in range(129)})
        if method == "nan":
            return Reward(score=float("nan"))
        text = request.solution_str
        return Reward(score=sum(letter.isupper() for letter in text) / len(text))
