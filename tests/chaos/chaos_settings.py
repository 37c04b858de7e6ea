"""The sizes, seeds and kinds of the chaos runs: one in CI, the others on demand (`make test-chaos`)."""

from enum import Enum
from typing import NamedTuple

from tests.chaos.fault_schedule import SERVICES, Fault, Target, fault_schedule

TRAJECTORIES = 16
"""Training trajectories of a step of a small run (tests/e2e/small_runs.py): 4 prompts, 4 rollouts each."""
TRACED = 8
"""Those that are traced: 2 prompts. MLflow takes longer for 16 than a step does."""


class RunKind(Enum):
    """Overrides of the run's configuration."""

    PLAIN = ()
    OVERLAPPED = ("async_training.staleness_threshold=1",)
    OVER_SAMPLED = ("trackway.over_sample_rate=0.2",)
    RANKS = ("trackway.learner_ranks=2",)
    SESSIONS = ("trackway.rollouts_from=sessions", "data.train_files=[]", "data.val_files=[]")

    @property
    def targets(self) -> tuple[Target, ...]:
        """The processes that may be signalled."""
        core = (Target.WORKER, Target.CONTROLLER)
        match self:
            case RunKind.PLAIN:
                return tuple(target for target in Target if target is not Target.RANK)
            case RunKind.RANKS:
                return (*core, Target.RANK, Target.TRAINER)
            case _:
                return (*core, Target.ROLLOUT, Target.AGENT, Target.TRAINER)


class ChaosSettings(NamedTuple):
    """A run and the number of its faults."""

    seed: int
    faults: int
    steps: int
    kind: RunKind = RunKind.PLAIN
    targets: tuple[Target, ...] | None = None
    """What faults may hit; by default the targets of the kind of run."""
    faults_until: int | None = None
    """The last step with a fault; by default the run's. A run goes on while a process recovers: it needs more."""

    @property
    def schedule(self) -> tuple[Fault, ...]:
        """The faults."""
        steps, targets = self.faults_until or self.steps, self.targets or self.kind.targets
        return fault_schedule(self.seed, self.faults, steps, TRAJECTORIES, targets)

    @property
    def name(self) -> str:
        """Kind and seed."""
        return f"{self.kind.name.lower()}-{self.seed}"


IN_CI = ChaosSettings(
    seed=3,
    faults=4,
    steps=20,
    targets=(*SERVICES, Target.WORKER, Target.MLFLOW, Target.PROXY),
    faults_until=6,
)
ON_DEMAND = [ChaosSettings(seed, faults=6, steps=40) for seed in range(10)]
"""Together they send every signal to every target of their kind."""
OF_KINDS = [
    ChaosSettings(seed, faults=4, steps=steps, kind=kind)
    for kind, first, steps in (
        *((RunKind.OVERLAPPED, 40, 16), (RunKind.OVER_SAMPLED, 40, 16)),
        *((RunKind.RANKS, 5, 16), (RunKind.SESSIONS, 40, 40)),
    )
    for seed in range(first, first + 5)
]
"""Five seeds of each other kind, which do the same. Runs on sessions go on while a process recovers: more steps."""
