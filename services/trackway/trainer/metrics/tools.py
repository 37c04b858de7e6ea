"""Metrics of the tool calls of a step, by tool.

All trajectories count, including those that failed after their calls, for example at scoring.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from trackway.wire.trajectory import ToolCallRecord, Trajectory

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
