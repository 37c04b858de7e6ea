"""The throughput of the limit of rollouts in flight on simulated replicas (kv_engine.py), beside fixed numbers.

    .venv/bin/python benchmarks/in_flight.py           every workload; some minutes of one core
    .venv/bin/python benchmarks/in_flight.py --json    the same for programs
    .venv/bin/python benchmarks/in_flight.py --workload "40 turns" --seeds 1

`adaptive` is the product's module, `trackway.clients.in_flight`, which gets the replicas' loads every two seconds. It
begins with the lower bound, one group, and knows no lengths. `fixed` runs the same trajectories with fixed numbers,
given as shares of the saturated number: as many as fit the replicas' KV caches at their mean length, or `max_num_seqs`.

Throughput is in generated tokens a second, as in routing.py: from the time at which half as many trajectories as the
saturated number have ended until the last one starts. `of_best_fixed` divides by the best fixed number's. The same for
`whole` has the time from the first start to the last end, with the ramp and the tail.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from kv_engine import H100, Call
from routing import SEED, Case, Run, Trajectory, Workload

from trackway.clients.in_flight import RolloutLimiter
from trackway.wire.rollout import EngineLoad

UPDATE_S = 2.0
MAX_LEN = 32_768
MOST = 100_000
WORKLOADS = {
    "40 turns": Workload(40),
    "8 turns": Workload(8),
    "long answers": Workload(3, prompt=500, output=2500),
    "shared prompt": Workload(8, prompt=8000),
    "slow tools": Workload(20, output=300, observation=800, tool_s=20.0),
}
LOADS = (0.5, 0.65, 0.75, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0)


class Outcome(NamedTuple):
    """A simulated run."""

    rate: float
    """Generated tokens a second between the ramp and the tail."""
    whole: float
    """Generated tokens a second of the whole run."""
    cached: float
    """Share of prompt tokens found in the cache."""
    preempted: float
    waiting: float
    """Mean number of requests that wait in the replicas."""
    in_flight: float
    """Mean number of trajectories in flight, over time."""


class LimitedRun(Run):
    """Trajectories of a workload begin as the limit of their client allows."""

    def __init__(self, workload: Workload, replicas: int, clients: int, rounds: float, seed: int, fixed: float) -> None:
        case = Case("h100", replicas, workload.turns, 1.0, clients)
        super().__init__(case, "trajectory", seed, rounds, workload)
        self.tokens = sum(turn.output for trajectory in self.todo for turn in trajectory.turns)
        self.limits = [round(fixed * replicas * workload.fitting(H100) / clients) or workload.n] * clients
        self.limiters = None if fixed else [RolloutLimiter(workload.n, MOST) for _ in range(clients)]
        self.flying = [0] * clients
        self.trace: list[tuple[float, int, EngineLoad]] = []

    def begin(self) -> None:
        self.push(0.0, -1, None)

    def tick(self, now: float) -> None:
        loads = [
            EngineLoad(
                running=len(engine.running),
                waiting=len(engine.waiting),
                preemptions=engine.preempted,
                kv_used=(engine.hardware.blocks - engine.free) * engine.hardware.block,
                kv_tokens=engine.hardware.blocks * engine.hardware.block,
                max_len=MAX_LEN,
                callers=self.case.clients,
            )
            for engine in self.engines
        ]
        for client, limiter in enumerate(self.limiters or []):
            self.limits[client] = limiter.update(loads, self.flying[client], now)
        self.start(now)
        self.trace.append((now, sum(self.flying), loads[0]))
        if any(self.flying):
            self.push(now + UPDATE_S, -1, None)

    def follow(self, now: float) -> None:
        self.start(now)

    def start(self, now: float) -> None:
        """Start the next trajectories while their clients are below their limits."""
        while self.todo and self.flying[self.todo[0].client] < self.limits[self.todo[0].client]:
            trajectory = self.todo.popleft()
            self.flying[trajectory.client] += 1
            self.push(now, -1, trajectory)

    def send(self, trajectory: Trajectory, now: float) -> None:
        if self.limiters:
            self.limiters[trajectory.client].begin_turn(trajectory.name, trajectory.length, now)
        super().send(trajectory, now)

    def answered(self, trajectory: Trajectory, call: Call, replica: int, now: float) -> None:
        last = trajectory.done + 1 == len(trajectory.turns)
        if self.limiters:
            limiter = self.limiters[trajectory.client]
            limiter.end_turn(trajectory.name, call.output, now)
            if last:
                limiter.release(trajectory.name)
        self.flying[trajectory.client] -= last
        super().answered(trajectory, call, replica, now)


def run(
    workload: str, fixed: float, replicas: int, clients: int, rounds: float, seeds: int, first: int = SEED
) -> Outcome:
    """Means over seeds; `fixed` is the share of the saturated number, or 0 for the limiter."""
    outcomes: list[Outcome] = []
    for seed in range(first, first + seeds):
        limited = LimitedRun(WORKLOADS[workload], replicas, clients, rounds, seed, fixed)
        found = limited.outcome()
        waiting = statistics.fmean(load.waiting for _, _, load in limited.trace) * replicas
        flying = statistics.fmean(flying for _, flying, _ in limited.trace)
        whole = limited.tokens / found.makespan_s
        outcomes.append(Outcome(found.rate, whole, found.cached, found.preempted, waiting, flying))
    return Outcome(*(statistics.fmean(values) for values in zip(*outcomes, strict=True)))


def report(adaptive: Outcome, fixed: dict[float, Outcome]) -> dict[str, object]:
    """A workload's outcomes, with the limiter's throughput over the best fixed number's."""
    best = max(fixed, key=lambda load: fixed[load].rate)
    return {
        "of_best_fixed": adaptive.rate / fixed[best].rate,
        "of_best_fixed_whole": adaptive.whole / max(outcome.whole for outcome in fixed.values()),
        "best_fixed": best,
        "adaptive": adaptive._asdict(),
        "fixed": {str(load): outcome._asdict() for load, outcome in fixed.items()},
    }


def show(name: str, outcome: Outcome) -> None:
    """Print one run."""
    print(
        f"  {name:10} {outcome.rate:9,.0f} tokens a second, whole {outcome.whole:9,.0f}, {outcome.cached:6.1%} cached, "
        f"{outcome.preempted:6.0f} preempted, {outcome.waiting:6.1f} waiting, {outcome.in_flight:6.0f} in flight",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the workloads and print a line for each number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS], action="append")
    parser.add_argument("--load", type=float, action="append", help="a fixed number, as a share of the saturated one")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=1, help="agent replicas, each of which limits by itself")
    parser.add_argument("--rounds", type=float, default=6.0, help="trajectories, in saturated numbers")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    shared = (options.replicas, options.clients, options.rounds, options.seeds, options.first_seed)
    reports: dict[str, dict[str, object]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        jobs = {
            name: {load: pool.submit(run, name, load, *shared) for load in (0.0, *(options.load or LOADS))}
            for name in options.workload or WORKLOADS
        }
        for name, by_load in jobs.items():
            outcomes = {load: job.result() for load, job in by_load.items()}
            adaptive = outcomes.pop(0.0)
            reports[name] = report(adaptive, outcomes)
            if not options.json:
                print(f"{name}, {options.replicas} replicas, {options.clients} clients:")
                show("adaptive", adaptive)
                for load, outcome in outcomes.items():
                    show(f"{load:g}", outcome)
                print(f"  {reports[name]['of_best_fixed']:.3f} of {reports[name]['best_fixed']}", flush=True)
    least = {
        f"{name}_min": min(float(str(found[name])) for found in reports.values())
        for name in ("of_best_fixed", "of_best_fixed_whole")
    }
    print(json.dumps({**least, "workloads": reports}, indent=1) if options.json else least)


if __name__ == "__main__":
    main()
