"""What `step.py` makes of the contenders' events: medians, ratios and the table. Pure functions."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_REPLICA = re.compile(r"ray::ServeReplica:(\w+)")
_NAMES = (
    ("trackway.trainer.worker", "learner"),
    ("ray::ProxyActor", "Serve's proxy"),
    ("ray::ServeController", "Serve's controller"),
    ("raylet/raylet", "raylet"),
    ("gcs/gcs_server", "gcs_server"),
    ("ray/dashboard/", "Ray's dashboard"),
    ("ray-dashboard", "Ray's dashboard"),
    ("ray::DashboardAgent", "Ray's dashboard"),
)


def process_name(command: str) -> str:
    """The name of a process of a deployment, by its command line or Ray's title."""
    replica = _REPLICA.search(command)
    if replica:
        return replica[1]
    return next((name for part, name in _NAMES if part in command), "other processes of Ray")


@dataclass(frozen=True)
class Round:
    """The steps that count of one run of a contender."""

    wall_s: list[float]
    cpu_s: dict[str, float]
    """Of an average step, by process."""
    others_cores: float
    """Cores that other programs of the machine used meanwhile."""
    reported: dict[str, Any] = field(default_factory=dict)
    """Other values that the contender reported, of an average step."""

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], warm: int, steps: int) -> "Round":
        """From a contender's events. ValueError when a step or the end is missing."""
        ends = {event["step"]: event for event in events if "step" in event}
        last = [event["end"] for event in events if "end" in event]
        missing = sorted({*range(warm, warm + steps + 1)} - {*ends})
        if missing or not last:
            raise ValueError(f"expected steps {warm} to {warm + steps} and an end, got no {missing or 'end'}")
        counted = [ends[step] for step in range(warm, warm + steps + 1)]
        first, final = counted[0], counted[-1]
        wall = [later["clock_s"] - earlier["clock_s"] for earlier, later in pairwise(counted)]
        cpu = {name: (spent - first["cpu_s"].get(name, 0.0)) / steps for name, spent in sorted(final["cpu_s"].items())}
        others = (final["machine_s"] - first["machine_s"]) - steps * sum(cpu.values())
        named = {"tokens", "calls", "reward"} & set(final)
        means = {name: statistics.fmean(event[name] for event in counted[1:]) for name in sorted(named)}
        return cls(wall, cpu, max(0.0, others) / sum(wall), means | last[0])


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Wall is the median of the rounds' median steps, CPU the median of their averages; the parts are averages."""
    names = sorted({name for measured in rounds for name in measured.cpu_s})
    by_process = {name: statistics.fmean(measured.cpu_s.get(name, 0.0) for measured in rounds) for name in names}
    reported: dict[str, Any] = {}
    for key in sorted({key for measured in rounds for key in measured.reported}):
        values = [measured.reported[key] for measured in rounds if key in measured.reported]
        reported[key] = (
            statistics.median(values) if all(isinstance(value, int | float) for value in values) else values[-1]
        )
    return {
        "wall_s": statistics.median(statistics.median(measured.wall_s) for measured in rounds),
        "cpu_s": statistics.median(sum(measured.cpu_s.values()) for measured in rounds),
        "cpu_s_by_process": dict(sorted(by_process.items(), key=lambda item: -item[1])),
        "wall_s_of_rounds": [statistics.median(measured.wall_s) for measured in rounds],
        "cpu_s_of_rounds": [sum(measured.cpu_s.values()) for measured in rounds],
        "other_programs_cores": statistics.median(measured.others_cores for measured in rounds),
        **reported,
    }


def ratio(own: Sequence[Round], other: Sequence[Round], what: str) -> float:
    """The median over the rounds of own by other; `what` is `wall_s` or `cpu_s`."""
    pairs = zip(own, other, strict=True)
    return statistics.median(_of(mine, what) / _of(theirs, what) for mine, theirs in pairs)


def _of(measured: Round, what: str) -> float:
    return statistics.median(measured.wall_s) if what == "wall_s" else sum(measured.cpu_s.values())


def report(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Everything, as `--json` prints it; ratios to TRL where it was measured."""
    found: dict[str, Any] = {"contenders": {name: summary(measured) for name, measured in rounds.items()}}
    if "trl" in rounds:
        for name, own in rounds.items():
            for what in ("wall_s", "cpu_s"):
                found["contenders"][name][f"{what.removesuffix('_s')}_ratio_trl"] = ratio(own, rounds["trl"], what)
        if "trackway" in rounds:
            found |= {key: found["contenders"]["trackway"][key] for key in ("wall_ratio_trl", "cpu_ratio_trl")}
    return found


def table(found: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = [f"{'':24} {'wall s':>8} {'CPU s':>8} {'of TRL: wall':>13} {'CPU':>6} {'tokens':>8} {'others cores':>13}"]
    for name, contender in found["contenders"].items():
        ratios = [contender.get(key, float("nan")) for key in ("wall_ratio_trl", "cpu_ratio_trl")]
        lines.append(
            f"{name:24} {contender['wall_s']:8.2f} {contender['cpu_s']:8.2f} {ratios[0]:13.2f} {ratios[1]:6.2f} "
            f"{contender['tokens']:8.0f} {contender['other_programs_cores']:13.2f}"
        )
    for name, contender in found["contenders"].items():
        if "requests" in contender:
            nice = contender["niceness"]
            spent = contender["cpu_s_by_process"].items()
            lines += ["", f"{name}: CPU s of a step by process (niceness)"]
            lines += [f"  {process:24} {cpu:6.3f}  ({nice.get(process, 0)})" for process, cpu in spent]
            lines += [f"{name}: requests of a step; {contender['tokens_per_decode_step']:.1f} tokens per decode step"]
            lines += [f"  {route:60} {count:8.1f}" for route, count in contender["requests"].items()]
    return "\n".join(lines)
