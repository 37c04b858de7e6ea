"""Metrics of a step that come from the trajectories and the clock, as pure functions; names are verl's.

The learner adds its own (`actor/*`, `critic/*`, lengths, turns and tokens).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trackway.trainer.metrics.tools import tool_metrics
from trackway.wire.tracing import Incident
from trackway.wire.trajectory import Trajectory

Metrics = dict[str, float]

_TIMED = ("generate_sequences", "tool_calls", "compute_score")
_PER_TOKEN = {"gen", "ref", "adv", "update_actor"}
_OFF_POLICY = "training/off_policy/trajectory"
_SAME = {"response_length/": "response_length_non_aborted/", "num_turns/": "training/num_turns/"}
"""A batch holds no aborted trajectory, so both lengths are the same."""


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
    mean = sum(values) / len(values)
    return {f"{name}/mean": mean, f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Tool calls and seconds within the agent loop of the trajectories that did not fail, and how many failed.

    `tools/*` is over all of them, see `tool_metrics`.
    """
    good = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics: Metrics = {"training/rollout_failure/failed_trajectories": float(len(trajectories) - len(good))}
    metrics |= spread("tool_call_counts", [tool_calls(trajectory) for trajectory in good])
    metrics |= spread("tool_call_counts/executed", [calls_executed(trajectory) for trajectory in good])
    for activity in _TIMED:
        seconds = [getattr(trajectory.timings, activity) for trajectory in good]
        metrics |= spread(f"timing_s/agent_loop/{activity}", seconds)
    if good:
        slowest = max(good, key=lambda trajectory: trajectory.timings.total)
        for activity in _TIMED:
            metrics[f"timing_s/agent_loop/slowest/{activity}"] = getattr(slowest.timings, activity)
        metrics["timing_s/agent_loop/slowest/response_length"] = float(len(slowest.response_ids))
    return metrics | tool_metrics(trajectories)


def incident_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """How many trajectories had each kind of incident, traced or not."""
    counts = Counter(incident for trajectory in trajectories for incident in set(trajectory.incidents))
    return {f"agent_loop/incidents/{incident}": float(counts[incident]) for incident in Incident}


def tool_calls(trajectory: Trajectory) -> int:
    """Calls that the model asked for."""
    return sum(len(message.tool_calls or ()) for turn in trajectory.turns for message in turn.messages)


def calls_executed(trajectory: Trajectory) -> int:
    """Calls that reached their tool: not those without a tool, over the limit of their turn, or in the last turn."""
    return sum(turn.calls_executed for turn in trajectory.turns)


def update_metrics(used: Sequence[Trajectory], version: int, max_prompt_length: int) -> Metrics:
    """How old the weights were that the trained trajectories come from, and how many prompts are as long as allowed.

    The newest version that wrote in a trajectory is `trajectory_staleness` behind `version`, the oldest
    `trajectory_staleness_worst`; `trajectory_spans` is how many versions it spans.
    """
    versions = [[span.version for span in trajectory.weight_versions] or [version] for trajectory in used]
    full = [len(trajectory.prompt_ids) >= max_prompt_length for trajectory in used]
    return {
        **spread(f"{_OFF_POLICY}_spans", [max(each) - min(each) + 1 for each in versions]),
        **spread(f"{_OFF_POLICY}_staleness", [version - max(each) for each in versions]),
        **spread(f"{_OFF_POLICY}_staleness_worst", [version - min(each) for each in versions]),
        "prompt_length/clip_ratio": sum(full) / len(full),
    }


def derived_metrics(metrics: Metrics, gpus: int = 1) -> Metrics:
    """What follows from a row's own metrics: rates, and other names under which verl's releases log the same."""
    found: Metrics = {}
    for name, other in _SAME.items():
        found |= {other + key.removeprefix(name): value for key, value in metrics.items() if key.startswith(name)}
    seconds, tokens = metrics.get("timing_s/step"), metrics.get("perf/total_num_tokens")
    if not seconds or not tokens:
        return found
    responses = metrics["response_length/mean"] * metrics["training/trajectories"]
    for activity in _PER_TOKEN & {name.removeprefix("timing_s/") for name in metrics}:
        among = responses if activity == "gen" else tokens
        found[f"timing_per_token_ms/{activity}"] = metrics[f"timing_s/{activity}"] * 1000 / among
    return found | {"perf/time_per_step": seconds, "perf/throughput": tokens / (seconds * gpus)}


def score(trajectory: Trajectory) -> float:
    """The reward's score; 0 for a trajectory that was not scored."""
    return 0.0 if trajectory.reward is None else trajectory.reward.score
