"""Summaries of an evaluation's rollouts, over all rows and for each data source, and the comparison of two."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from trackway.trainer.metrics import Mean, accuracy, best_of, draws, majority_at, mean_of, pass_all, pass_at
from trackway.wire.chat import ChatModelSettings
from trackway.wire.trajectory import StopReason, Trajectory


class Estimate(BaseModel):
    """An average over tasks with its error."""

    value: float
    std_err: float | None = None
    """Standard error over tasks. Null for one task."""
    interval: tuple[float, float] | None = None
    """95 % interval."""
    tasks: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "Estimate":
        """The estimate of one value for each task."""
        mean: Mean = mean_of(values)
        return cls(value=mean.value, std_err=mean.error, interval=mean.interval, tasks=len(values))


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

    def metrics(self) -> dict[str, float]:
        """The numbers as metrics of a run, `evaluation/pass@4` with `evaluation/pass@4/std_err`."""
        rates = {"pass@": self.pass_at, "pass_all@": self.pass_all, "majority@": self.majority_at}
        estimates = {f"{name}{k}": value for name, found in rates.items() for k, value in found.items()}
        if self.score is not None:
            estimates["score"] = self.score
        metrics = {f"evaluation/{name}": estimate.value for name, estimate in estimates.items()}
        errors = {name: value.std_err for name, value in estimates.items() if value.std_err is not None}
        return metrics | {f"evaluation/{name}/std_err": error for name, error in errors.items()}


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


_CUT = {StopReason.MAX_TURNS, StopReason.MAX_RESPONSE, StopReason.MAX_PROMPT}


def by_task(trajectories: Iterable[Trajectory]) -> dict[int | str, list[Trajectory]]:
    """The trajectories of each row, by its index."""
    tasks: dict[int | str, list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.tags.sample_index, []).append(trajectory)
    return tasks


def summary(trajectories: Sequence[Trajectory], pass_above: float = 0.0) -> RolloutSummary:
    """The summary of all rollouts; one passes with a score over `pass_above`."""
    ended = [trajectory for trajectory in trajectories if trajectory.error is None]
    failures = [trajectory.error.code.value for trajectory in trajectories if trajectory.error is not None]
    errors = {code: failures.count(code) for code in sorted({*failures})}
    counts = {"tasks": len(by_task(trajectories)), "rollouts": len(ended), "failed": len(failures), "errors": errors}
    if not ended:
        return RolloutSummary(**counts)
    tasks = [_Task(members, pass_above) for members in by_task(ended).values()]
    answers = any(answer is not None for task in tasks for answer in task.answers)
    calls = [call for trajectory in ended for turn in _turns(trajectory) for call in turn.calls]
    return RolloutSummary(
        **counts,
        score=Estimate.over([math.fsum(task.scores) / task.n for task in tasks]),
        pass_at=_at_each(tasks, lambda task, k: pass_at(task.n, task.correct, k)),
        pass_all=_at_each(tasks, lambda task, k: pass_all(task.n, task.correct, k)),
        best_at=_at_each(tasks, lambda task, k: best_of(k, task.scores)[0]),
        majority_at=_at_each(tasks, lambda task, k: majority_at(task.answers, task.passed, k)) if answers else {},
        no_answer=_share(ended, lambda rollout: rollout.reward is None or rollout.reward.answer is None)
        if answers
        else None,
        response_tokens=_share(ended, lambda rollout: rollout.counts.generated_tokens),
        turns=_share(ended, lambda rollout: len(_turns(rollout))),
        tool_calls=len(calls) / len(ended),
        failed_calls=sum(call.error is not None for call in calls) / len(ended),
        cut=_share(ended, lambda rollout: rollout.stop_reason in _CUT),
        tokens=sum(rollout.counts.prompt_tokens + rollout.counts.response_tokens for rollout in ended),
    )


def by_data_source(trajectories: Sequence[Trajectory], pass_above: float = 0.0) -> dict[str, RolloutSummary]:
    """A summary for each data source, in the order of the rows."""
    sources: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        sources.setdefault(trajectory.data_source, []).append(trajectory)
    return {source: summary(members, pass_above) for source, members in sources.items()}


class _Task:
    """The rollouts of a row that ended."""

    def __init__(self, members: Sequence[Trajectory], pass_above: float) -> None:
        self.n = len(members)
        self.scores = [accuracy(trajectory) for trajectory in members]
        self.passed = [score > pass_above for score in self.scores]
        self.correct = sum(self.passed)
        self.answers = [trajectory.reward.answer if trajectory.reward else None for trajectory in members]


def _at_each(tasks: Sequence[_Task], value: Callable[[_Task, int], float | None]) -> dict[int, Estimate]:
    estimates: dict[int, Estimate] = {}
    for k in draws(max(task.n for task in tasks)):
        values = [found for task in tasks if task.n >= k and (found := value(task, k)) is not None]
        if values:
            estimates[k] = Estimate.over(values)
    return estimates


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
