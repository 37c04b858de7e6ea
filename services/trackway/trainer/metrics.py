"""Metrics of a step that come from the trajectories and the clock, as pure functions; names are verl's.

The learner adds its own (`actor/*`, `critic/*`, lengths, turns and tokens).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trackway.trainer.tool_metrics import tool_metrics
from trackway.wire.tracing import Incident
from trackway.wire.trajectory import Trajectory

Metrics = dict[str, float]

_TIMED = ("generate_sequences", "tool_calls", "compute_score")


class Clock:
    """Seconds by activity, as `timing_s/<activity>`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        """Time a block; the same activity adds up until `take`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[activity] += time.perf_counter() - started

    def take(self) -> Metrics:
        """Everything timed since the last `take`."""
        taken = {f"timing_s/{activity}": seconds for activity, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


def spread(name: str, values: Sequence[float]) -> Metrics:
    """`name/mean`, `/max` and `/min`; nothing for no values."""
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Tool calls and seconds within the agent loop of the trajectories that did not fail, and how many failed.

    `tools/*` is over all of them, see `tool_metrics`.
    """
    good = [one for one in trajectories if one.error is None]
    metrics: Metrics = {"training/rollout_failure/failed_trajectories": float(len(trajectories) - len(good))}
    metrics |= spread("tool_call_counts", [float(tool_calls(one)) for one in good])
    metrics |= spread("tool_call_counts/executed", [float(calls_executed(one)) for one in good])
    for activity in _TIMED:
        metrics |= spread(f"timing_s/agent_loop/{activity}", [getattr(one.timings, activity) for one in good])
    if good:
        slowest = max(good, key=lambda one: one.timings.total)
        for activity in _TIMED:
            metrics[f"timing_s/agent_loop/slowest/{activity}"] = getattr(slowest.timings, activity)
        metrics["timing_s/agent_loop/slowest/response_length"] = float(len(slowest.response_ids))
    return metrics | tool_metrics(trajectories)


def incident_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """How many trajectories each kind of incident happened to, traced or not."""
    counts = Counter(incident for one in trajectories for incident in set(one.incidents))
    return {f"agent_loop/incidents/{incident}": float(counts[incident]) for incident in Incident}


def tool_calls(trajectory: Trajectory) -> int:
    """Calls that the model asked for."""
    return sum(len(message.tool_calls or ()) for turn in trajectory.turns for message in turn.messages)


def calls_executed(trajectory: Trajectory) -> int:
    """Calls that reached their tool: not those without a tool, over the limit of their turn, or in the last turn."""
    return sum(turn.calls_executed for turn in trajectory.turns)


def throughput(metrics: Metrics) -> Metrics:
    """Seconds of the step and tokens per second of the one learner process, from the step's own metrics."""
    seconds, tokens = metrics.get("timing_s/step"), metrics.get("perf/total_num_tokens")
    if not seconds or tokens is None:
        return {}
    return {"perf/time_per_step": seconds, "perf/throughput": tokens / seconds}


def validation_metrics(trajectories: Sequence[Trajectory], n: int) -> Metrics:
    """`val-core/<data_source>/{acc,reward}/mean@n` over the trajectories that did not fail.

    acc is the reward's component of that name, or the score when the scorer gives none. `val-aux/tools/*` is over all.
    """
    metrics: Metrics = {}
    sources: dict[str, list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        if one.error is None:
            sources[one.data_source].append(one)
    for source, members in sources.items():
        metrics[f"val-core/{source}/acc/mean@{n}"] = _mean(members, _accuracy)
        metrics[f"val-core/{source}/reward/mean@{n}"] = _mean(members, score)
    metrics |= spread("val-aux/num_turns", [float(one.num_turns) for one in trajectories if one.error is None])
    metrics["val-aux/failed_trajectories"] = float(sum(one.error is not None for one in trajectories))
    return metrics | tool_metrics(trajectories, "val-aux/tools")


def score(trajectory: Trajectory) -> float:
    """The reward's score; 0 for a trajectory that was not scored."""
    return 0.0 if trajectory.reward is None else trajectory.reward.score


def _accuracy(trajectory: Trajectory) -> float:
    components = trajectory.reward.components if trajectory.reward else {}
    return components.get("acc", score(trajectory))


def _mean(members: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> float:
    return sum(value(one) for one in members) / len(members)
