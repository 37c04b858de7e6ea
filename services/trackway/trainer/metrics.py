"""Metrics of a step from its trajectories and timings, as pure functions with verl's names.

The learner adds `actor/*`, `critic/*`, lengths, turns and tokens. Metrics of tools count all trajectories, including
those that failed after their calls, for example at scoring. Metrics of a validation are pass@k, best-of and majority.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, Self

from pydantic import BaseModel

from trackway.learner.measuring import Metrics, spread
from trackway.wire.trajectory import ACTIVITIES, Incident, ToolCallRecord, Trajectory

MOST_KEYS = 64
"""Most metrics reported for one tool, the first by name: a tool may create new names without limit."""
_LONGEST_PART = 64
_COMPONENT = "tool/"
"""Prefix of the reward components that are tool rewards."""


def tool_metrics(trajectories: Sequence[Trajectory], prefix: str = "tools") -> dict[str, float]:
    """`<prefix>/<tool>/*`: calls, errors by code, seconds, rewards per call and instance, the tool's own metrics."""
    calls: dict[str, list[ToolCallRecord]] = defaultdict(list)
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for record in (call for turn in trajectory.turns for call in turn.calls):
            calls[_part(record.tool)].append(record)
        for name, reward in (trajectory.reward.components if trajectory.reward else {}).items():
            if name.startswith(_COMPONENT):
                rewards[_part(name.removeprefix(_COMPONENT))].append(reward)
    metrics: dict[str, float] = {}
    for tool, records in sorted(calls.items()):
        metrics |= {f"{prefix}/{tool}/{name}": value for name, value in _of_calls(records).items()}
    for tool, values in sorted(rewards.items()):
        metrics[f"{prefix}/{tool}/instance_reward/mean"] = _mean(values)
    return metrics


def _of_calls(records: Sequence[ToolCallRecord]) -> dict[str, float]:
    seconds = [record.seconds for record in records]
    answered = [record for record in records if record.error is None]
    codes = Counter(record.error.value for record in records if record.error is not None)
    return {
        "calls": float(len(records)),
        "errors": float(len(records) - len(answered)),
        **{f"error_codes/{code}": float(count) for code, count in sorted(codes.items())},
        "truncated": float(sum(record.truncated for record in records)),
        "seconds/mean": _mean(seconds),
        "seconds/max": max(seconds),
        **({"reward/mean": _mean([record.reward for record in answered])} if answered else {}),
        **_measured(answered),
    }


def _measured(records: Iterable[ToolCallRecord]) -> dict[str, float]:
    """Means of the tool's own metrics, each over the calls that reported it."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for key, value in record.metrics.items():
            values[_part(key)].append(value)
    return {f"metrics/{key}/mean": _mean(values[key]) for key in sorted(values)[:MOST_KEYS]}


def _part(name: str) -> str:
    """A name as one part of a metric name. MLflow accepts letters, digits, `_`, `-` and `.`, but not `.` or `..`."""
    part = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_LONGEST_PART]
    return part if part.strip(".") else "_"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_PER_TOKEN = {"gen", "ref", "values", "adv", "update_critic", "update_actor"}
_OF_TRAINER = ("overlong_reward", "reward_baseline")
"""Components that the trainer adds to a reward."""
MOST_COMPONENTS = 512
"""Most names of reward components in the metrics of a step, the first ones by name."""
_OFF_POLICY = "training/off_policy/trajectory"
_SAME = {"response_length/": "response_length_non_aborted/", "num_turns/": "training/num_turns/"}
"""A batch contains no aborted trajectories, so both names have the same value."""


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Tool calls and agent loop timings of the successful trajectories, and the number of failed trajectories.

    `agent_loop/guided_tokens` is the number of tokens that a grammar guided. Only where there are some.

    `tools/*` covers all trajectories. See `tool_metrics`.
    """
    successful = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics: Metrics = {"training/rollout_failure/failed_trajectories": float(len(trajectories) - len(successful))}
    metrics |= spread("tool_call_counts", [tool_calls(trajectory) for trajectory in successful])
    metrics |= spread("tool_call_counts/executed", [calls_executed(trajectory) for trajectory in successful])
    if guided := sum(map(guided_tokens, successful)):
        metrics["agent_loop/guided_tokens"] = float(guided)
    for activity in ACTIVITIES:
        seconds = [getattr(trajectory.timings, activity) for trajectory in successful]
        metrics |= spread(f"timing_s/agent_loop/{activity}", seconds)
    if successful:
        slowest = max(successful, key=lambda trajectory: trajectory.timings.total)
        for activity in ACTIVITIES:
            metrics[f"timing_s/agent_loop/slowest/{activity}"] = getattr(slowest.timings, activity)
        metrics["timing_s/agent_loop/slowest/response_length"] = float(len(slowest.response_ids))
    return metrics | tool_metrics(trajectories)


def incident_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """The number of trajectories, traced or not, with each kind of incident."""
    counts = Counter(incident for trajectory in trajectories for incident in set(trajectory.incidents))
    return {f"agent_loop/incidents/{incident}": float(counts[incident]) for incident in Incident}


def tool_calls(trajectory: Trajectory) -> int:
    """The number of tool calls that the model requested."""
    turns = [turn for row in trajectory.rows for turn in row.turns]
    return sum(len(message.tool_calls or ()) for turn in turns for message in turn.messages)


def guided_tokens(trajectory: Trajectory) -> int:
    """The number of the model's tokens that a grammar guided, which are not trained."""
    turns = [turn for row in trajectory.rows for turn in row.turns]
    return sum(turn.response_end - turn.response_start for turn in turns if turn.guided)


def calls_executed(trajectory: Trajectory) -> int:
    """The number of calls that reached a tool, without unknown tools, calls over the turn's limit and the last turn."""
    return sum(turn.calls_executed for turn in trajectory.turns)


def update_metrics(used: Sequence[Trajectory], version: int, max_prompt_length: int) -> Metrics:
    """Components of the rewards, staleness of the weights, and the share of prompts at the maximum length.

    A component is `reward/<name>` over the trajectories that have it, or `critic/<name>` if the trainer added it. Those
    of tools are left to `tool_metrics`. `reward/turn_scores` is over all turns that have a score of their own, and
    `reward/token_scores` over all tokens.

    `trajectory_staleness` is how many versions the newest weights of a trajectory are behind `version`,
    `trajectory_staleness_worst` the same for its oldest weights, and `trajectory_spans` the number of versions it
    spans.
    """
    spans = [[span for row in trajectory.rows for span in row.weight_versions] for trajectory in used]
    versions = [[span.version for span in of_one] or [version] for of_one in spans]
    full = [len(trajectory.prompt_ids) >= max_prompt_length for trajectory in used]
    components: defaultdict[str, list[float]] = defaultdict(list)
    for reward in (trajectory.reward for trajectory in used if trajectory.reward):
        for name, value in reward.components.items():
            if "/" not in name:
                components[f"critic/{name}" if name in _OF_TRAINER else f"reward/{name}"].append(value)
        components["reward/turn_scores"] += reward.turn_scores
        components["reward/token_scores"] += reward.token_scores
    return {
        **{
            key: value
            for name in sorted(components)[:MOST_COMPONENTS]
            for key, value in spread(name, components[name]).items()
        },
        **spread(f"{_OFF_POLICY}_spans", [max(seen) - min(seen) + 1 for seen in versions]),
        **spread(f"{_OFF_POLICY}_staleness", [version - max(seen) for seen in versions]),
        **spread(f"{_OFF_POLICY}_staleness_worst", [version - min(seen) for seen in versions]),
        "prompt_length/clip_ratio": sum(full) / len(full),
    }


def derived_metrics(metrics: Metrics, gpus: int = 1) -> Metrics:
    """Metrics derived from a row's own: rates, and the other names under which verl's releases log the same value.

    `fully_async/trainer/idle_ratio` is the share of the step in which the learner waited for rollouts, as in verl.
    """
    derived: Metrics = {}
    for name, other in _SAME.items():
        derived |= {other + key.removeprefix(name): value for key, value in metrics.items() if key.startswith(name)}
    seconds, tokens = metrics.get("timing_s/step"), metrics.get("perf/total_num_tokens")
    if seconds and "timing_s/gen" in metrics:
        derived["fully_async/trainer/idle_ratio"] = metrics["timing_s/gen"] / seconds
    if not seconds or not tokens:
        return derived
    responses = metrics["response_length/mean"] * metrics["training/trajectories"]
    for activity in _PER_TOKEN & {name.removeprefix("timing_s/") for name in metrics}:
        per = responses if activity == "gen" else tokens
        derived[f"timing_per_token_ms/{activity}"] = metrics[f"timing_s/{activity}"] * 1000 / per
    return derived | {"perf/time_per_step": seconds, "perf/throughput": tokens / (seconds * gpus)}


def score(trajectory: Trajectory) -> float:
    """The reward's score. 0 for a trajectory that was not scored."""
    return 0.0 if trajectory.reward is None else trajectory.reward.score


CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_MOST_VOTES = 64
"""Most rollouts of a task for which the votes of fewer than all are counted."""


class Estimate(BaseModel):
    """An average over tasks with its error."""

    value: float
    std_err: float | None = None
    """Standard error s / sqrt(tasks) (Miller 2024, arXiv:2411.00640). Null for one task."""
    interval: tuple[float, float] | None = None
    """95 % interval of the normal distribution. Null for one task."""
    tasks: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """The estimate of one value for each task."""
        mean, tasks = math.fsum(values) / len(values), len(values)
        if tasks == 1:
            return cls(value=mean, tasks=1)
        error = math.sqrt(math.fsum(_squared(value - mean) for value in values) / (tasks - 1) / tasks)
        return cls(value=mean, std_err=error, interval=(mean - _Z * error, mean + _Z * error), tasks=tasks)


def estimate_metrics(prefix: str, estimates: Mapping[str, Estimate]) -> Metrics:
    """The estimates as metrics, `<prefix>/pass@4` with `<prefix>/pass@4/std_err`."""
    errors = {f"{name}/std_err": found.std_err for name, found in estimates.items() if found.std_err is not None}
    values = {name: found.value for name, found in estimates.items()}
    return {f"{prefix}/{name}": value for name, value in (values | errors).items()}


def draws(n: int) -> list[int]:
    """The k that are reported of n rollouts: 1, 2, 4, ... below n, and n."""
    return [*(2**power for power in range(n.bit_length()) if 2**power < n), n]


def pass_at(n: int, correct: int, k: int) -> float:
    """pass@k: the chance that k of n rollouts have a correct one, 1 - C(n-c, k)/C(n, k) (Chen et al. 2021)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def pass_all(n: int, correct: int, k: int) -> float:
    """pass^k: the chance that k of n rollouts are all correct, C(c, k)/C(n, k) (tau-bench, arXiv:2406.12045)."""
    return math.comb(correct, k) / math.comb(n, k)


def majority_at(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float | None:
    """majority@k: the chance that the most frequent answer of k rollouts is correct; a tie is shared.

    A rollout without an answer does not vote. None where k of more than 64 rollouts would have to be counted.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right and answer is not None}
    if k == len(answers):
        most = max(counts.values(), default=0)
        winners = [answer for answer, count in counts.items() if count == most]
        return sum(answer in right for answer in winners) / len(winners) if winners else 0.0
    if len(answers) > _MOST_VOTES:
        return None
    silent = len(answers) - counts.total()
    won = Fraction(0)
    for answer in right & counts.keys():
        others = Counter(counts.values())
        others[counts[answer]] -= 1
        won += _shares_won(counts[answer], tuple(sorted(others.elements())), silent, k)
    return float(won / math.comb(len(answers), k))


@lru_cache(maxsize=1024)
def _shares_won(own: int, others: tuple[int, ...], silent: int, k: int) -> Fraction:
    """Choices of k rollouts that an answer given `own` times wins, each divided by the number of winners."""
    won = Fraction(0)
    for votes in range(1, min(own, k) + 1):
        ways = {(k - votes - unheard, 1): math.comb(silent, unheard) for unheard in range(min(silent, k - votes) + 1)}
        for given in others:
            after = Counter[tuple[int, int]]()
            for (left, winners), number in ways.items():
                for chosen in range(min(given, left, votes) + 1):
                    after[left - chosen, winners + (chosen == votes)] += number * math.comb(given, chosen)
            ways = after
        shares = sum((Fraction(number, winners) for (left, winners), number in ways.items() if left == 0), Fraction(0))
        won += math.comb(own, votes) * shares
    return won


Rate = Literal["pass", "pass_all", "best", "majority"]
"""pass@k, pass^k, verl's best@k and majority@k."""


class Task:
    """The rollouts of a row that ended. One passes with a score over `pass_above`."""

    def __init__(self, rollouts: Sequence[Trajectory], pass_above: float = 0.0) -> None:
        self.rollouts = rollouts
        self.n = len(rollouts)
        self.scores = [accuracy(trajectory) for trajectory in rollouts]
        self.passed = [score > pass_above for score in self.scores]
        self.answers = [trajectory.reward.answer if trajectory.reward else None for trajectory in rollouts]

    @property
    def score(self) -> float:
        """The mean score."""
        return math.fsum(self.scores) / self.n

    def rate(self, name: Rate, k: int) -> float | None:
        """Return the rate of k rollouts. None for a majority that is not counted."""
        match name:
            case "pass":
                return pass_at(self.n, sum(self.passed), k)
            case "pass_all":
                return pass_all(self.n, sum(self.passed), k)
            case "best":
                return best_of(k, self.scores)[0]
            case "majority":
                return majority_at(self.answers, self.passed, k)


def tasks_of(trajectories: Iterable[Trajectory], pass_above: float = 0.0) -> dict[int | str, Task]:
    """Return the rows with a rollout that ended, by index."""
    ended = (trajectory for trajectory in trajectories if trajectory.error is None)
    return {index: Task(members, pass_above) for index, members in by_task(ended).items()}


def by_task(trajectories: Iterable[Trajectory]) -> dict[int | str, list[Trajectory]]:
    """The trajectories of each row, by its index."""
    tasks: dict[int | str, list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.tags.sample_index, []).append(trajectory)
    return tasks


def rates(tasks: Collection[Task], name: Rate, ks: Iterable[int]) -> dict[int, Estimate]:
    """Return the mean rate for each k, over the tasks that have k rollouts. Empty for a majority without any answer."""
    if name == "majority" and not any(answer is not None for task in tasks for answer in task.answers):
        return {}
    found = {k: [rate for task in tasks if task.n >= k and (rate := task.rate(name, k)) is not None] for k in ks}
    return {k: Estimate.over(values) for k, values in found.items() if values}


CORE = "acc"
"""The variable in `val-core`. The reward is repeated there because dashboards of older releases expect it."""


def validation_metrics(trajectories: Sequence[Trajectory], n: int) -> Metrics:
    """Metrics of each data source over the successful trajectories; `val-aux/tools/*` covers all trajectories.

    `acc` is `accuracy`. Other components keep their own names, the first 512 by name for each data source.
    """
    successful = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics: Metrics = {}
    for source in dict.fromkeys(trajectory.data_source for trajectory in successful):
        members = [trajectory for trajectory in successful if trajectory.data_source == source]
        for variable, groups in _variables(members).items():
            for name, value in _group_metrics(groups, n).items():
                core = variable == CORE and name.startswith(("mean@", f"best@{n}/"))
                metrics[f"val-{'core' if core else 'aux'}/{source}/{variable}/{name}"] = value
        metrics[f"val-core/{source}/reward/mean@{n}"] = metrics[f"val-aux/{source}/reward/mean@{n}"]
        metrics |= _estimates(f"val-aux/{source}/{CORE}", tasks_of(members).values(), n)
    metrics |= spread("val-aux/num_turns", [trajectory.num_turns for trajectory in successful])
    metrics["val-aux/failed_trajectories"] = float(len(trajectories) - len(successful))
    return metrics | tool_metrics(trajectories, "val-aux/tools")


def accuracy(trajectory: Trajectory) -> float:
    """The reward component `acc`, or the score without the penalty on long responses."""
    components = {} if trajectory.reward is None else trajectory.reward.components
    return components.get(CORE, components.get("score", score(trajectory)))


def _estimates(prefix: str, tasks: Collection[Task], n: int) -> Metrics:
    """pass@k, pass^k and majority@k of a data source as an evaluation reports them, and the error of the mean score."""
    names: tuple[Rate, ...] = ("pass", "pass_all", "majority")
    ks = draws(n)[1:]
    found = {f"{name}@{k}": rate for name in names for k, rate in rates(tasks, name, ks).items()}
    error = Estimate.over([task.score for task in tasks]).std_err
    return estimate_metrics(prefix, found) | ({} if error is None else {f"{prefix}/mean@{n}/std_err": error})


def _variables(members: Sequence[Trajectory]) -> Mapping[str, list[list[float]]]:
    """Variable -> its values, one list per row. Components with a `/` in their name are left to `tool_metrics`."""
    values: dict[str, dict[int | str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in members:
        all_components = {} if trajectory.reward is None else trajectory.reward.components
        components = {name: value for name, value in all_components.items() if "/" not in name}
        for name, value in {CORE: accuracy(trajectory), **components, "reward": score(trajectory)}.items():
            values[name][trajectory.tags.sample_index].append(value)
    own = sorted(values.keys() - {CORE, "reward"})[:MOST_COMPONENTS]
    return {name: list(values[name].values()) for name in (CORE, *own, "reward")}


def _group_metrics(groups: Sequence[Sequence[float]], n: int) -> Metrics:
    """The mean over all values; standard deviation, best and worst of k averaged over the rows."""
    flat = [value for group in groups for value in group]
    metrics = {f"mean@{n}": sum(flat) / len(flat)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = _mean([_std(group) for group in groups])
    for k in draws(n)[1:]:
        for name, sign in (("best", 1.0), ("worst", -1.0)):
            moments = [best_of(k, [sign * value for value in group]) for group in groups]
            metrics[f"{name}@{k}/mean"] = sign * _mean([mean for mean, _ in moments])
            metrics[f"{name}@{k}/std"] = _mean([std for _, std in moments])
    return metrics


def best_of(k: int, values: Sequence[float]) -> tuple[float, float]:
    """verl's best@k: mean and standard deviation of the largest of k draws with replacement."""
    size = len(values)
    weights = [(rank / size) ** k - ((rank - 1) / size) ** k for rank in range(1, size + 1)]
    ordered = sorted(values)
    mean = sum(weight * value for weight, value in zip(weights, ordered, strict=True))
    square = sum(weight * _squared(value - mean) for weight, value in zip(weights, ordered, strict=True))
    return mean, math.sqrt(square)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([_squared(value - mean) for value in values]))


def _squared(value: float) -> float:
    return value * value  # returns infinity where ** raises OverflowError
