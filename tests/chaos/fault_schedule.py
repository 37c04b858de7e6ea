"""Which process of a deployment gets which signal at which moment of a run: a pure function of a seed.

On a single node Ray's own processes (the GCS, the raylet, the dashboard) are no targets: without its head a single node
has nothing that could start the services again. `tests/cluster` kills nodes and heads.
"""

import random
from collections.abc import Sequence
from enum import StrEnum
from signal import Signals
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Target(StrEnum):
    """Processes that may be signalled."""

    ROLLOUT = "rollout"
    TOOLS = "tools"
    REWARD = "reward"
    AGENT = "agent"
    TRAINER = "trainer"
    """Up to here: the replica of a service."""
    WORKER = "worker"
    """The run's own process, which the trainer's replica started."""
    MLFLOW = "mlflow"
    """MLflow's server and its children, without the process that started them."""
    PROXY = "proxy"
    """Ray Serve's HTTP proxy."""
    CONTROLLER = "controller"
    """Ray Serve's controller, which Ray starts again."""
    RANK = "rank"
    """A process of the learner of several ranks, beside the worker."""


SERVICES = (Target.ROLLOUT, Target.TOOLS, Target.REWARD, Target.AGENT, Target.TRAINER)
SIGNALS = (Signals.SIGKILL, Signals.SIGSTOP, Signals.SIGTERM)
LONGEST = (Target.CONTROLLER, Signals.SIGTERM)
"""Ray takes a minute for it, in which the run goes on: it does not need the controller."""
MIN_STOP_S, MAX_STOP_S = 1.0, 5.0
"""Seconds between SIGSTOP and SIGCONT: less than the 10 s after which Serve takes a replica or proxy for unhealthy."""


class Moment(NamedTuple):
    """A point of a run's progress."""

    step: int
    """Steps that are done."""
    trajectories: int
    """Training trajectories that have ended since then."""


class Fault(NamedTuple):
    """A signal to all processes of a target at a moment."""

    moment: Moment
    target: Target
    signal: Signals
    stop_s: float = 0.0
    """Seconds from SIGSTOP to SIGCONT; 0 for other signals."""


def fault_schedule(
    seed: int, faults: int, steps: int, trajectories: int, targets: Sequence[Target]
) -> tuple[Fault, ...]:
    """`faults` faults in a run of `steps` steps with `trajectories` trajectories each, in the order of their moments.

    No two have the same step or the same pair of target and signal, and none comes during or after the last step.
    `LONGEST` comes last: the run could end during its recovery.

    Raises ValueError when there are fewer such steps or pairs than faults.
    """
    generator = random.Random(seed)
    pairs = [(target, signal) for target in targets for signal in SIGNALS]
    drawn_steps = sorted(_drawn(generator, range(steps - 1), faults))
    schedule: list[Fault] = []
    drawn_pairs = sorted(_drawn(generator, pairs, faults), key=LONGEST.__eq__)
    for step, (target, signal) in zip(drawn_steps, drawn_pairs, strict=True):
        moment = Moment(step, int(generator.random() * trajectories))
        share = generator.random()
        stop_s = round(MIN_STOP_S + share * (MAX_STOP_S - MIN_STOP_S), 1) if signal is Signals.SIGSTOP else 0.0
        schedule.append(Fault(moment, target, signal, stop_s))
    return tuple(schedule)


def spread(faults: Sequence[Fault], step: int, steps: int) -> tuple[Fault, ...]:
    """The faults that are left when `step` of `steps` steps are done.

    When the first one's step went by, each comes at the earliest at its even share of the rest of the run.
    """
    if not faults or faults[0].moment.step >= step:
        return tuple(faults)
    rest = steps - 1 - step
    shares = [step + (position + 1) * rest // (len(faults) + 1) for position in range(len(faults))]
    return tuple(
        fault._replace(moment=fault.moment._replace(step=max(share, fault.moment.step)))
        for fault, share in zip(faults, shares, strict=True)
    )


def _drawn(generator: random.Random, items: Sequence[T], count: int) -> list[T]:
    """`count` different items in random order."""
    if count > len(items):
        raise ValueError(f"expected at most {len(items)} faults, got {count}; give the run more steps or draw fewer")
    # Only random() gives the same numbers in every version of Python: sample() and choice() may change.
    rest = list(items)
    return [rest.pop(int(generator.random() * len(rest))) for _ in range(count)]
