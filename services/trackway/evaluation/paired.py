"""Two evaluations of the same rows, compared row by row."""

from collections.abc import Sequence

from pydantic import BaseModel

from trackway.evaluation.summary import Estimate, by_task
from trackway.trainer.metrics.pass_rates import pass_at
from trackway.trainer.metrics.validation import accuracy
from trackway.wire.trajectory import Trajectory


class Paired(BaseModel):
    """Differences of the first evaluation to the second, over the rows that both have."""

    score: Estimate
    """Difference of mean scores. The rows' difficulty cancels out, so its error is smaller than the errors of both."""
    pass_at_1: Estimate
    better: int
    """Rows with a higher mean score."""
    worse: int
    left_out: int
    """Rows that only one of them has, or that have another prompt there, or no rollout that ended."""


def paired(first: Sequence[Trajectory], second: Sequence[Trajectory], pass_above: float = 0.0) -> Paired | None:
    """Compare two evaluations. None without a common row. The interval is for the mean difference per row.

    Source: Miller 2024, "Adding error bars to evals" (arXiv:2411.00640), section 4.2.
    """
    ours, theirs = by_task(first), by_task(second)
    scores, passes = list[float](), list[float]()
    for index in ours.keys() & theirs.keys():
        pair = [_ended(tasks[index]) for tasks in (ours, theirs)]
        if not all(pair) or len({_prompt(rollouts) for rollouts in pair}) > 1:
            continue
        mine, other = (_scores(rollouts) for rollouts in pair)
        scores.append(sum(mine) / len(mine) - sum(other) / len(other))
        passes.append(_passed(mine, pass_above) - _passed(other, pass_above))
    if not scores:
        return None
    return Paired(
        score=Estimate.over(scores),
        pass_at_1=Estimate.over(passes),
        better=sum(difference > 0 for difference in scores),
        worse=sum(difference < 0 for difference in scores),
        left_out=len(ours.keys() | theirs.keys()) - len(scores),
    )


def _ended(rollouts: Sequence[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in rollouts if trajectory.error is None]


def _prompt(rollouts: Sequence[Trajectory]) -> str:
    return str([(message.role, message.content) for message in rollouts[0].prompt_messages])


def _scores(rollouts: Sequence[Trajectory]) -> list[float]:
    return [accuracy(trajectory) for trajectory in rollouts]


def _passed(scores: Sequence[float], pass_above: float) -> float:
    return pass_at(len(scores), sum(score > pass_above for score in scores), 1)
