"""The throughput of routing policies on simulated replicas (kv_engine.py), beside an oracle.

    .venv/bin/python benchmarks/routing.py           every case; some minutes of one core
    .venv/bin/python benchmarks/routing.py --json    the same for programs
    .venv/bin/python benchmarks/routing.py --replicas 4 --turns 40 --seeds 1

`trajectory` is the product's module, `trackway.clients.direct`. Its rivals are rewritten here by their rules:
consistent hashing of the group (the product's `group`), the replica with the fewest calls for each call, SkyRL's
sticky_least_loaded, and the prefix-aware router of Ray Serve 2.60 (`PrefixCacheAffinityRouter`) with its defaults and
with its documentation's imbalance threshold of 10. All rivals see the exact number of calls of each replica, the
product's module only what it did itself.

The oracle knows every output length, and each replica's cache, and assigns greedily: once by call, to the least known
work with the prompt's missing part, once by trajectory and once by group, to the least known rest of all trajectories
there. The best one counts.

A case is `load` times as many trajectories at once as fit a replica's KV cache or its `max_num_seqs`. Throughput is in
generated tokens a second, from the time at which half as many trajectories as run at once have ended until the last one
starts. Prompts, outputs, observations, tool times and numbers of turns are log-normal.
"""

import argparse
import functools
import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from kv_engine import CPU, H100, Call, Engine, Hardware

from trackway.clients.direct import TrajectoryRouting


class Turn(NamedTuple):
    """A generation, and what comes after it."""

    output: int
    observation: int
    tool_s: float


@dataclass(eq=False)
class Trajectory:
    """One rollout."""

    name: str
    group: str
    prompt: int
    """Tokens that its group shares."""
    turns: list[Turn]
    client: int
    done: int = 0
    """Turns that have ended."""
    length: int = 0
    """Prompt tokens of the next turn."""
    replica: int | None = None
    """The replica of its latest turn."""


@dataclass(frozen=True)
class Workload:
    """Means of a run's trajectories, in tokens and seconds."""

    turns: int
    prompt: float = 1000.0
    output: float = 150.0
    observation: float = 250.0
    tool_s: float = 2.0
    n: int = 8
    """Trajectories of a group."""

    def trajectories(self, count: int, clients: int, seed: int) -> list[Trajectory]:
        """At least `count`, in whole groups, each group of one client."""
        draw = random.Random(seed)

        def lognormal(mean: float, spread: float) -> float:
            return mean * math.exp(spread * draw.gauss(0, 1) - spread * spread / 2)

        def turn(output: float) -> Turn:
            made = min(4000, max(4, round(lognormal(output, 0.8))))
            return Turn(made, max(8, round(lognormal(self.observation, 0.8))), lognormal(self.tool_s, 1.0))

        found: list[Trajectory] = []
        for group in range(math.ceil(count / self.n)):
            prompt, output = max(64, round(lognormal(self.prompt, 0.5))), lognormal(self.output, 0.4)
            for number in range(self.n):
                turns = min(2 * self.turns, max(1, round(lognormal(self.turns, 0.3))))
                made = [turn(output) for _ in range(turns)]
                found.append(Trajectory(f"{group}/{number}", str(group), prompt, made, group % clients, length=prompt))
        return found

    def fitting(self, hardware: Hardware) -> float:
        """Trajectories that fit a replica: their mean context its KV cache, and their number `max_num_seqs`."""
        context = self.prompt + self.turns / 2 * (self.output + self.observation)
        return min(hardware.blocks * hardware.block / context, hardware.max_num_seqs)


class Policy:
    """Chooses the replica of each call."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        self.engines = engines
        self.draw = random.Random(seed)

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        """Return the index of a replica."""
        raise NotImplementedError

    def ended(self, trajectory: Trajectory, call: Call, replica: int) -> None:
        """A call has its answer."""

    def released(self, trajectory: Trajectory, replica: int) -> None:
        """A trajectory has ended."""

    def least(self, loads: Iterable[float]) -> int:
        """The index of the least load; of equals a random one."""
        return min(enumerate(loads), key=lambda load: (load[1], self.draw.random()))[0]


@functools.cache
def _weight(key: str, replica: int) -> bytes:
    return blake2b(f"r{replica} {key}".encode(), digest_size=8).digest()


def _ranked(key: str, replicas: int) -> list[int]:
    return sorted(range(replicas), key=lambda replica: _weight(key, replica), reverse=True)


class Hash(Policy):
    """Consistent hashing of the group: `group` of the product, and Ray Serve's ConsistentHashRouter."""

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        return _ranked(trajectory.group, len(self.engines))[0]


class LeastLoaded(Policy):
    """The replica with the fewest calls, for each call."""

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        return self.least(engine.load for engine in self.engines)


class StickyLeastLoaded(Policy):
    """The replica with the fewest trajectories, for the whole trajectory."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self.living: Counter[int] = Counter()

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        if trajectory.replica is not None:
            return trajectory.replica
        best = self.least(self.living[replica] for replica in range(len(self.engines)))
        self.living[best] += 1
        return best

    def released(self, trajectory: Trajectory, replica: int) -> None:
        self.living[replica] -= 1


class RayPrefix(Policy):
    """Ray Serve's PrefixCacheAffinityRouter, with `imbalanced_threshold` infinite and no eviction.

    The replicas with the longest known prefix, if it is a tenth of the prompt; else those with the fewest characters in
    the prefix tree; of these the one with the shortest queue. Of unbalanced queues: the better of two random replicas.
    """

    threshold = math.inf

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self.known: dict[str, dict[int, int]] = {}
        self.size: Counter[int] = Counter()

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        loads = [engine.load for engine in self.engines]
        chosen = self.draw.sample(range(len(loads)), min(2, len(loads)))
        if max(loads) - min(loads) <= self.threshold:
            lengths = Counter(self.known.get(trajectory.group, {}))
            lengths |= Counter(self.known.get(trajectory.name, {}))
            longest = max(lengths.values(), default=0)
            if longest / call.prompt < 0.1:
                sizes = [self.size[replica] for replica in range(len(loads))]
                chosen = [replica for replica, size in enumerate(sizes) if size == min(sizes)]
            else:
                chosen = [replica for replica, length in lengths.items() if length == longest]
        best = chosen[self.least(loads[replica] for replica in chosen)]
        own, shared = self.known.setdefault(trajectory.name, {}), self.known.setdefault(trajectory.group, {})
        self.size[best] += call.prompt - (own.get(best) or shared.get(best) or 0)
        own[best], shared[best] = call.prompt, trajectory.prompt
        return best


class RayPrefix10(RayPrefix):
    """The same with an `imbalanced_threshold` of 10."""

    threshold = 10


class OracleCall(Policy):
    """Knows what every call will generate and what each cache holds: the least work, the missing prompt included."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self.known: defaultdict[int, float] = defaultdict(float)

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        costs = self.engines[0].hardware.costs

        def total(replica: int) -> float:
            missing = call.prompt - self.engines[replica].cached(call)
            prefill_s = missing * costs.prefilled + missing * (call.prompt - missing / 2) * costs.attended
            return self.known[replica] + prefill_s

        best = min(range(len(self.engines)), key=lambda replica: (total(replica), replica != trajectory.replica))
        self.known[best] += self.seconds(call.prompt, call.output)
        return best

    def ended(self, trajectory: Trajectory, call: Call, replica: int) -> None:
        self.known[replica] -= self.seconds(call.prompt, call.output)

    def seconds(self, prompt: int, output: int) -> float:
        """Work that a generation adds to the steps in which it takes part."""
        costs = self.engines[0].hardware.costs
        return output * (costs.decoded + costs.read * (prompt + output / 2))


class OracleTrajectory(OracleCall):
    """Knows all that a trajectory will generate: the least rest of all trajectories there, for the whole trajectory."""

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        if trajectory.replica is not None:
            return trajectory.replica
        best = self.start(trajectory)
        length = trajectory.prompt
        for turn in trajectory.turns:
            self.known[best] += self.seconds(length, turn.output)
            length += turn.output + turn.observation
        return best

    def start(self, trajectory: Trajectory) -> int:
        """The replica of a trajectory's first turn."""
        return self.least(self.known[replica] for replica in range(len(self.engines)))


class OracleGroup(OracleTrajectory):
    """The same for whole groups, which then compute their prompt once."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self.groups: dict[str, int] = {}

    def start(self, trajectory: Trajectory) -> int:
        if trajectory.group not in self.groups:
            self.groups[trajectory.group] = super().start(trajectory)
        return self.groups[trajectory.group]


class Ours(Policy):
    """`trackway.clients.direct`, in each client by itself."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self.routings: dict[int, TrajectoryRouting] = {}

    def choose(self, trajectory: Trajectory, call: Call) -> int:
        routing = self.routings.setdefault(trajectory.client, TrajectoryRouting())
        names = [f"{replica}" for replica in _ranked(trajectory.group, len(self.engines))]
        return int(routing.place(trajectory.name, trajectory.group, call.prompt, names))

    def released(self, trajectory: Trajectory, replica: int) -> None:
        self.routings[trajectory.client].release(trajectory.name)


OURS, ORACLES = "trajectory", ("oracle by call", "oracle by trajectory", "oracle by group")
POLICIES: dict[str, type[Policy]] = {
    OURS: Ours,
    "group hash": Hash,
    "least loaded": LeastLoaded,
    "sticky least loaded": StickyLeastLoaded,
    "Ray prefix": RayPrefix,
    "Ray prefix, threshold 10": RayPrefix10,
    ORACLES[0]: OracleCall,
    ORACLES[1]: OracleTrajectory,
    ORACLES[2]: OracleGroup,
}
SEED = 11
"""The first seed. The constants of the product's module were chosen with the seeds 1 to 3 and H100 only."""
HARDWARE = {"h100": H100, "cpu": CPU}


@dataclass(frozen=True)
class Case:
    """Replicas and the trajectories at once."""

    hardware: str
    replicas: int
    turns: int
    load: float
    clients: int = 1
    added: int = 0
    """Replicas that join when the measurement begins."""


class Outcome(NamedTuple):
    """A simulated run."""

    rate: float
    """Generated tokens a second."""
    cached: float
    """Share of prompt tokens found in the cache."""
    stayed: float
    """Share of later turns on the replica of the turn before."""
    preempted: int
    makespan_s: float
    peak: float
    """Most calls of an added replica at a time, over the mean of the others then."""


class Run:
    """One policy on one case: trajectories begin as others end, so that as many run at any time."""

    def __init__(
        self, case: Case, policy: str, seed: int, rounds: float = 3.0, workload: Workload | None = None
    ) -> None:
        hardware, workload = HARDWARE[case.hardware], workload or WORKLOADS[case.hardware, case.turns]
        self.engines = [Engine(hardware) for _ in range(case.replicas)]
        self.policy = POLICIES[policy](self.engines, seed)
        at_once = max(workload.n, round(case.replicas * case.load * workload.fitting(hardware)))
        self.todo = deque(workload.trajectories(round(rounds * at_once), case.clients, seed))
        self.at_once, self.ended = at_once, 0
        self.callers: dict[Call, Trajectory] = {}
        self.events: list[tuple[float, int, int, Trajectory | None]] = []
        self.planned = [math.inf] * case.replicas
        self.order = itertools.count()
        self.later = self.moved = 0
        self.marks: list[tuple[float, float]] = []
        self.case, self.peak = case, 0.0

    def outcome(self) -> Outcome:
        """Run it to its end."""
        self.begin()
        now = 0.0
        while self.events:
            now, _, replica, trajectory = heapq.heappop(self.events)
            if trajectory is not None:
                self.send(trajectory, now)
            elif replica < 0:
                self.tick(now)
            elif self.engines[replica].next_at == now:
                for call in self.engines[replica].step():
                    self.answered(self.callers.pop(call), call, replica, now)
                self.plan(replica)
        work = [engine.work for engine in self.engines]
        reused, computed = sum(engine.reused for engine in self.engines), sum(done.prefilled for done in work)
        (start, before), (end, after) = self.marks
        preempted = sum(engine.preempted for engine in self.engines)
        stayed = 1 - self.moved / max(1, self.later)
        rate = (after - before) / (end - start)
        return Outcome(rate, reused / (reused + computed), stayed, preempted, now, self.peak)

    def begin(self) -> None:
        """Start as many trajectories as run at once."""
        draw = random.Random(0)
        for _ in range(min(self.at_once, len(self.todo))):
            self.push(draw.random() * 5.0, -1, self.todo.popleft())

    def follow(self, now: float) -> None:
        """Start one more trajectory as another has ended."""
        if self.todo:
            self.push(now, -1, self.todo.popleft())

    def push(self, at: float, replica: int, trajectory: Trajectory | None) -> None:
        heapq.heappush(self.events, (at, next(self.order), replica, trajectory))

    def tick(self, now: float) -> None:
        """Do what is due at a time that was pushed without a trajectory."""

    def plan(self, replica: int) -> None:
        """Wake up when the replica's steps end. An earlier plan is passed over."""
        self.planned[replica] = self.engines[replica].next_at
        if self.planned[replica] < math.inf:
            self.push(self.planned[replica], replica, None)

    def send(self, trajectory: Trajectory, now: float) -> None:
        turn = trajectory.turns[trajectory.done]
        call = Call(trajectory.name, trajectory.group, trajectory.prompt, trajectory.length, turn.output)
        replica = self.policy.choose(trajectory, call)
        if trajectory.replica is not None:
            self.later += 1
            self.moved += replica != trajectory.replica
        trajectory.replica = replica
        self.callers[call] = trajectory
        self.engines[replica].add(call, now)
        if replica >= self.case.replicas and len(self.marks) == 1:
            others = statistics.fmean(engine.load for engine in self.engines[: self.case.replicas])
            self.peak = max(self.peak, self.engines[replica].load / max(1.0, others))
        if self.engines[replica].next_at != self.planned[replica]:
            self.plan(replica)

    def answered(self, trajectory: Trajectory, call: Call, replica: int, now: float) -> None:
        self.policy.ended(trajectory, call, replica)
        turn = trajectory.turns[trajectory.done]
        trajectory.done += 1
        if trajectory.done < len(trajectory.turns):
            trajectory.length += turn.output + turn.observation
            self.push(now + turn.tool_s, -1, trajectory)
            return
        self.policy.released(trajectory, replica)
        self.ended += 1
        self.follow(now)
        if self.ended == self.at_once // 2 or (not self.todo and len(self.marks) == 1):
            self.marks.append((now, sum(engine.work.decoded for engine in self.engines)))
        if self.ended == self.at_once // 2:
            self.engines += [Engine(self.engines[0].hardware, now) for _ in range(self.case.added)]
            self.planned += [math.inf] * self.case.added


WORKLOADS = {
    ("h100", 8): Workload(8),
    ("h100", 40): Workload(40),
    ("cpu", 8): Workload(8, prompt=250, output=40, observation=60),
    ("cpu", 40): Workload(40, prompt=250, output=40, observation=60),
}


def mean_outcome(case: Case, policy: str, seeds: int) -> dict[str, float]:
    """Means over seeds."""
    outcomes = [Run(case, policy, seed).outcome() for seed in range(SEED, SEED + seeds)]
    return {name: statistics.fmean(getattr(found, name) for found in outcomes) for name in Outcome._fields}


def report(case: Case, outcomes: Mapping[str, Mapping[str, float]]) -> dict[str, object]:
    """A case's outcomes, with the product's throughput over the oracle's and over the best rival's."""
    rates = {policy: outcome["rate"] for policy, outcome in outcomes.items()}
    oracle = max(rates[name] for name in ORACLES)
    rival = max((rate, name) for name, rate in rates.items() if name not in (OURS, *ORACLES))
    ratios = {"of_oracle": rates[OURS] / oracle, "of_best": rates[OURS] / rival[0], "best": rival[1]}
    return {**asdict(case), **ratios, "policies": outcomes}


def main() -> None:
    """Run the cases side by side and print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=[*HARDWARE], action="append")
    parser.add_argument("--replicas", type=int, action="append")
    parser.add_argument("--turns", type=int, choices=[8, 40], action="append")
    parser.add_argument("--load", type=float, action="append", help="0.5 is half full, 1.0 saturated")
    parser.add_argument("--add", type=int, default=0, help="replicas that join when the measurement begins")
    parser.add_argument("--clients", type=int, default=1, help="agent replicas, each of which routes by itself")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [
        Case(hardware, replicas, turns, load, options.clients, options.add)
        for hardware in options.hardware or ["h100"]
        for turns in options.turns or [8, 40]
        for load in options.load or [0.5, 1.0]
        for replicas in options.replicas or [1, 2, 4, 8]
    ]
    reports: list[dict[str, object]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        jobs = {
            case: {name: pool.submit(mean_outcome, case, name, options.seeds) for name in POLICIES} for case in cases
        }
        for case in cases:
            outcomes = {name: job.result() for name, job in jobs[case].items()}
            reports.append(report(case, outcomes))
            if not options.json:
                show(case, reports[-1], outcomes)
    ratios = {name: min(float(str(found[name])) for found in reports) for name in ("of_oracle", "of_best")}
    totals = {f"{name}_min": ratio for name, ratio in ratios.items()}
    print(json.dumps({**totals, "cases": reports}, indent=1) if options.json else totals)


def show(case: Case, found: Mapping[str, object], outcomes: Mapping[str, Mapping[str, float]]) -> None:
    """Print one case."""
    print(f"{case.hardware}, {case.replicas} replicas, {case.turns} turns, load {case.load:g}:")
    for name, outcome in outcomes.items():
        print(
            f"  {name:26} {outcome['rate']:9,.0f} tokens a second, {outcome['cached']:6.1%} cached, "
            f"{outcome['stayed']:6.1%} stayed, {outcome['preempted']:5.0f} preempted, "
            f"{outcome['makespan_s']:6,.0f} s" + (f", peak {outcome['peak']:.2f}" if case.added else "")
        )
    print(f"  {found['of_oracle']:.3f} of the oracle, {found['of_best']:.3f} of {found['best']}", flush=True)


if __name__ == "__main__":
    main()
