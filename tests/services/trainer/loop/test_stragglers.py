"""Slow groups hold no step, and yet long answers train as often as they are drawn: many steps in simulated time."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from scipy.stats import ks_2samp

from tests.services.trainer.loop.simulated_loop import SimulatedLoop
from trackway.trainer.data.dataset import Position, Prompts
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.loop.scheduler import GroupScheduler, Pacing
from trackway.wire.agent import Sample
from trackway.wire.trajectory import StopReason, Tags, Trajectory

BATCH, STEPS, TRAIN_S = 8, 120, 2.0
MIDDLE = range(STEPS // 3, 2 * STEPS // 3)
"""Steps in which as many groups are begun as trained."""
SAME, DIFFERENT = 0.5, 0.001
"""p-values above and below which lengths count as drawn alike, and as not."""


class Lengths(GroupSource):
    """Groups whose seconds, the length of their answers, are log-normal, at most 90."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.begun: list[tuple[int, float]] = []
        """Step and seconds of each group."""

    @property
    def n(self) -> int:
        """One rollout, which stands for its group."""
        return 1

    async def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> list[Trajectory]:
        seconds = min(90.0, 8.0 * math.exp(0.8 * self._random.gauss(0.0, 1.0)))
        self.begun.append((step, seconds))
        await asyncio.sleep(seconds)
        tags = Tags(experiment_name="e", step=step, sample_index=sample.index, rollout_n=0)
        return [
            Trajectory(
                id=f"{step}/{sample.index}",
                session_id=str(seconds),
                tags=tags,
                agent_name="a",
                data_source="d",
                stop_reason=StopReason.ANSWERED,
            )
        ]


@dataclass
class Outcome:
    """A run of `STEPS` steps."""

    seconds: float = 0.0
    drawn: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Step and length of each group that was begun."""
    trained: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    account: dict[str, int] = field(default_factory=dict[str, int])
    oldest: int = 0
    """Most versions from the start of a group to its training."""

    def likeness(self) -> float:
        """The p-value of the two-sample Kolmogorov-Smirnov test of the lengths in the middle of the run.

        Groups dropped as stale were drawn like any other.
        """
        drawn = [length for step, length in self.drawn if step - 1 in MIDDLE]
        trained = [length for step, length in self.trained if step - 1 in MIDDLE]
        tested = ks_2samp(drawn, trained, method="asymp")
        return float(tested.pvalue)  # pyright: ignore[reportAttributeAccessIssue]


async def train(samples: list[Sample], pacing: Pacing, seed: int, aborts: bool) -> Outcome:
    """The steps of a run. With `aborts` the groups that a step leaves are thrown away."""
    prompts, lengths, outcome = Prompts(samples, BATCH, 0, shuffle=False), Lengths(seed), Outcome()
    scheduler, position = GroupScheduler(prompts, lengths, pacing), Position()
    for step in range(STEPS):
        scheduler.submit(step, position, step, lambda number, size: frozenset(), STEPS - step)
        taken = await scheduler.take(step, position)
        outcome.trained += [(step + 1, float(group.session_id)) for group in taken]
        outcome.oldest = max([outcome.oldest, *(step + 1 - group.tags.step for group in taken)])
        await asyncio.sleep(TRAIN_S)
        scheduler.used({"used": len(taken)})
        account = scheduler.account()
        assert account.pop("submitted") == sum(account.values())
        _, position = prompts.take(position)
        if aborts:
            await scheduler.close()
            scheduler = GroupScheduler(prompts, lengths, pacing)
    outcome.seconds, outcome.drawn = asyncio.get_running_loop().time(), lengths.begun
    outcome.account = scheduler.account()
    return outcome


@pytest.fixture(scope="module")
def trains(sample: Callable[[int], Sample]) -> Callable[..., Outcome]:
    """Runs the steps with pacing."""
    samples = [sample(index) for index in range(BATCH * STEPS * 4)]

    def run(seed: int = 0, aborts: bool = False, **pacing: float) -> Outcome:
        paced = Pacing(BATCH, **pacing)  # pyright: ignore[reportArgumentType]
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            return runner.run(train(samples, paced, seed, aborts))

    return run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "pacing",
    [
        {"over_sample": 0.2, "bound": 2},
        {"over_sample": 0.5, "bound": 2},
        {"depth": 1, "over_sample": 0.2, "bound": 3},
        {"depth": 2, "over_sample": 0.2, "bound": 4},
    ],
)
def test_lengths_that_train_are_those_that_were_drawn(
    trains: Callable[..., Outcome], seed: int, pacing: dict[str, float]
):
    outcome = trains(seed, **pacing)

    assert outcome.likeness() > SAME
    assert sorted(length for _, length in outcome.trained) == sorted(length for _, length in outcome.drawn)
    assert outcome.account == dict.fromkeys(outcome.account, 0) | dict.fromkeys(("submitted", "used"), BATCH * STEPS)
    assert 1 <= outcome.oldest <= pacing["bound"]


def test_groups_that_are_aborted_or_dropped_as_stale_are_the_long_ones(trains: Callable[..., Outcome]):
    aborted, dropped = trains(over_sample=0.2, aborts=True, bound=2), trains(depth=1, bound=1, drop=True)

    assert max(aborted.likeness(), dropped.likeness()) < DIFFERENT
    assert dropped.account["dropped_stale"] > 0


def test_a_step_takes_less_time_the_more_groups_it_may_leave(trains: Callable[..., Outcome]):
    in_turns, a_fifth, half = trains(), trains(over_sample=0.2, bound=2), trains(over_sample=0.5, bound=2)
    ahead, both = trains(depth=1, bound=1), trains(depth=1, over_sample=0.2, bound=3)

    assert in_turns.seconds > 1.3 * a_fifth.seconds > 1.3 * half.seconds
    assert ahead.seconds > 1.3 * both.seconds
