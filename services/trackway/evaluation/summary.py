"""Summaries of an evaluation's rollouts, over all rows and for each data source, and the comparison of two."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, JsonValue

from trackway.trainer.metrics import Estimate, Task, by_task, draws, rates, tasks_of
from trackway.wire.chat import ChatModelSettings
from trackway.wire.trajectory import StopReason, Trajectory


class RolloutSummary(BaseModel):
    """Rollouts of several tasks. Rollouts that an infrastructure error ended are in `failed` and nothing else."""

    tasks: int
    rollouts: int
    """Rollouts that ended, without `failed`."""
    failed: int
    errors: dict[str, int] = Field(default_factory=dict)
    """Failed rollouts by error code."""
    score: Estimate | None = None
    """Mean of the tasks' mean scores, or null when every rollout failed."""
    pass_at: dict[int, Estimate] = Field(default_factory=dict)
    """pass@k: of k rollouts, drawn without replacement, at least one passes. Counts tasks with at least k rollouts."""
    pass_all: dict[int, Estimate] = Field(default_factory=dict)
    """pass^k: all of k rollouts pass."""
    best_at: dict[int, Estimate] = Field(default_factory=dict)
    """verl's best@k: the expected best score of k draws with replacement, which is below pass@k."""
    majority_at: dict[int, Estimate] = Field(default_factory=dict)
    """majority@k: the most frequent answer of k rollouts passes; empty unless the scorer names answers."""
    no_answer: float | None = None
    """Share of rollouts without an answer, or null unless the scorer names answers."""
    response_tokens: float = 0.0
    """Mean tokens that the model wrote in a rollout."""
    turns: float = 0.0
    """Mean turns of the model."""
    tool_calls: float = 0.0
    """Mean calls that reached a tool."""
    failed_calls: float = 0.0
    """Mean calls that failed."""
    cut: float = 0.0
    """Share of rollouts that a limit of tokens or turns ended."""
    tokens: int = 0
    """Tokens of all prompts and responses."""

    @property
    def estimates(self) -> dict[str, Estimate]:
        """The score and the rates by name, `pass@4`."""
        named = {"pass": self.pass_at, "pass_all": self.pass_all, "best": self.best_at, "majority": self.majority_at}
        found = {f"{name}@{k}": estimate for name, by_k in named.items() for k, estimate in by_k.items()}
        return found if self.score is None else {"score": self.score, **found}


class Evaluation(BaseModel):
    """The subject of an evaluation, and the result once it has ended."""

    name: str
    model: str
    """A run with its step, or a model as it was given."""
    checkpoint: Path | None = None
    """The evaluated checkpoint of a run, or null when the configuration names the model."""
    endpoint: ChatModelSettings | None = None
    """The server and the model that were asked, or null for a model whose tokens are read."""
    policy: str | None = None
    """The policy of running services that was asked, or null for their default one and for any other model."""
    files: list[str]
    rows: int
    n: int
    """Rollouts of each row."""
    temperature: float = 1.0
    pass_above: float = 0.0
    """A rollout passes with a score over it."""
    summary: RolloutSummary | None = None
    data_sources: dict[str, RolloutSummary] = Field(default_factory=dict)


_MEANS = ("response_tokens", "turns", "tool_calls", "failed_calls", "cut")
_CUT = {StopReason.MAX_TURNS, StopReason.MAX_RESPONSE, StopReason.MAX_PROMPT}


def summary(trajectories: Sequence[Trajectory], pass_above: float = 0.0) -> RolloutSummary:
    """The summary of all rollouts; one passes with a score over `pass_above`."""
    ended = [trajectory for trajectory in trajectories if trajectory.error is None]
    failures = [trajectory.error.code.value for trajectory in trajectories if trajectory.error is not None]
    errors = {code: failures.count(code) for code in sorted({*failures})}
    counts = {"tasks": len(by_task(trajectories)), "rollouts": len(ended), "failed": len(failures), "errors": errors}
    if not ended:
        return RolloutSummary(**counts)
    tasks = [*tasks_of(ended, pass_above).values()]
    ks = draws(max(task.n for task in tasks))
    majority = rates(tasks, "majority", ks)
    calls = [call for trajectory in ended for turn in _turns(trajectory) for call in turn.calls]
    return RolloutSummary(
        **counts,
        score=Estimate.over([task.score for task in tasks]),
        pass_at=rates(tasks, "pass", ks),
        pass_all=rates(tasks, "pass_all", ks),
        best_at=rates(tasks, "best", ks),
        majority_at=majority,
        no_answer=_share(ended, lambda rollout: rollout.reward is None or rollout.reward.answer is None)
        if majority
        else None,
        response_tokens=_share(ended, lambda rollout: rollout.counts.generated_tokens),
        turns=_share(ended, lambda rollout: len(_turns(rollout))),
        tool_calls=len(calls) / len(ended),
        failed_calls=sum(call.error is not None for call in calls) / len(ended),
        cut=_share(ended, lambda rollout: rollout.stop_reason in _CUT),
        tokens=sum(rollout.counts.prompt_tokens + rollout.counts.response_tokens for rollout in ended),
    )


def task_rows(trajectories: Iterable[Trajectory], pass_above: float = 0.0) -> Iterator[dict[str, JsonValue]]:
    """Yield the numbers of each row: `n` rollouts that ended, `c` of them passed, rates, means and tokens."""
    trajectories = [*trajectories]
    tasks = tasks_of(trajectories, pass_above)
    for index, members in by_task(trajectories).items():
        found = summary(members, pass_above)
        plain = found.model_dump(mode="json", include={"failed", *_MEANS, "no_answer", "tokens"}, exclude_none=True)
        yield {
            "sample_index": index,
            "data_source": members[0].data_source,
            "n": found.rollouts,
            "c": sum(tasks[index].passed) if index in tasks else 0,
            **{name: estimate.value for name, estimate in found.estimates.items()},
            **plain,
        }


def by_data_source(trajectories: Sequence[Trajectory], pass_above: float = 0.0) -> dict[str, RolloutSummary]:
    """A summary for each data source, in the order of the rows."""
    sources: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        sources.setdefault(trajectory.data_source, []).append(trajectory)
    return {source: summary(members, pass_above) for source, members in sources.items()}


def _turns(trajectory: Trajectory) -> list:
    return [turn for row in trajectory.rows for turn in row.turns]


def _share(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> float:
    return math.fsum(map(value, trajectories)) / len(trajectories)


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
    ours, theirs = tasks_of(first, pass_above), tasks_of(second, pass_above)
    pairs = [(ours[index], theirs[index]) for index in ours.keys() & theirs.keys()]
    pairs = [(mine, other) for mine, other in pairs if _prompt(mine) == _prompt(other)]
    scores = [mine.score - other.score for mine, other in pairs]
    if not scores:
        return None
    return Paired(
        score=Estimate.over(scores),
        pass_at_1=Estimate.over([sum(mine.passed) / mine.n - sum(other.passed) / other.n for mine, other in pairs]),
        better=sum(difference > 0 for difference in scores),
        worse=sum(difference < 0 for difference in scores),
        left_out=len({trajectory.tags.sample_index for trajectory in (*first, *second)}) - len(scores),
    )


def _prompt(task: Task) -> list[tuple[str, str]]:
    return [(message.role, str(message.content)) for message in task.rollouts[0].prompt_messages]
