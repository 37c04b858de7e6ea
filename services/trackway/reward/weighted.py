"""The protocol of scorers, and a weighted sum of them as one scorer."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from trackway.wire.base import Finite
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward


@runtime_checkable
class Scorer(Protocol):
    """Scores solutions for certain data sources."""

    @property
    def info(self) -> ScorerInfo:
        """Name, data sources and methods. The first method is the default."""
        ...

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """Score one solution with a method. Raises TrackwayError for an invalid request."""
        ...


class WeightedScorers(BaseModel):
    """A sum of scorers, which then score through it only."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str = "weighted"
    """Name of the sum."""
    data_sources: list[str] = Field(default_factory=lambda: [ANY_DATA_SOURCE])
    """Data sources that it scores. `*` is every one that has no other scorer."""
    weights: dict[str, Finite] = Field(min_length=1)
    """Weight of each scorer by its name (`gsm8k`, `judge`, `module.function`, `file.py:function`). The score is the sum
    of the weights times the scores. Weights need not add up to 1."""


class WeightedScorer:
    """Scores with all of its scorers at the same time. The error of one is the error of the sum.

    Each score becomes a component under its scorer's name, beside that scorer's own components. One whose name is taken
    is called `<scorer>.<component>`. Scores of turns are weighed and added too.
    """

    def __init__(self, settings: WeightedScorers, scorers: Mapping[str, Scorer]) -> None:
        terms = " + ".join(f"{weight:g} x {name}" for name, weight in settings.weights.items())
        self.info = ScorerInfo(
            name=settings.name, data_sources=settings.data_sources, methods=["default"], description=f"{terms}."
        )
        self._parts = [(name, weight, scorers[name]) for name, weight in settings.weights.items()]

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """The weighted sum. Raises the first error of a scorer."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(scorer.score(request, scorer.info.methods[0])) for *_, scorer in self._parts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        rewards = [(name, weight, task.result()) for (name, weight, _), task in zip(self._parts, tasks, strict=True)]
        components = {name: reward.score for name, _, reward in rewards}
        for name, _, reward in rewards:
            for key, value in reward.components.items():
                components[f"{name}.{key}" if key in components else key] = value
        by_turn = [
            [weight * score for score in reward.turn_scores] for _, weight, reward in rewards if reward.turn_scores
        ]
        return Reward(
            score=sum(weight * reward.score for _, weight, reward in rewards),
            components=components,
            turn_scores=[sum(scores) for scores in zip(*by_turn, strict=True)],
        )


def combined(scorers: Sequence[Scorer], sums: Sequence[WeightedScorers]) -> list[Scorer]:
    """The sums, and the scorers that are in none. ValueError for a sum with a name of no scorer, or of several."""
    by_name = {scorer.info.name: scorer for scorer in scorers}
    for settings in sums:
        unknown = [name for name in settings.weights if name not in by_name]
        if unknown:
            raise ValueError(
                f"weighted_scorers, {settings.name!r}: expected scorers among {', '.join(sorted(by_name))}, got "
                f"{', '.join(unknown)}; correct weights"
            )
        doubled = [name for name in settings.weights if [scorer.info.name for scorer in scorers].count(name) > 1]
        if doubled:
            raise ValueError(
                f"weighted_scorers, {settings.name!r}: expected one scorer of each name, got several of "
                f"{', '.join(doubled)}; give each a name of its own"
            )
    within = {name for settings in sums for name in settings.weights}
    free = [scorer for scorer in scorers if scorer.info.name not in within]
    return [*(WeightedScorer(settings, by_name) for settings in sums), *free]
