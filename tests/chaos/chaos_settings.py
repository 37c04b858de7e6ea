"""The sizes and seeds of the chaos runs: one in CI, ten on demand (`make test-chaos`)."""

from typing import NamedTuple

from tests.chaos.fault_schedule import Fault, fault_schedule

TRAJECTORIES = 16
"""Training trajectories of a step of a small run (tests/e2e/small_runs.py): 4 prompts, 4 rollouts each."""
TRACED = 8
"""Those that are traced: 2 prompts. MLflow takes longer for 16 than a step does."""


class ChaosSettings(NamedTuple):
    """A run and the number of its faults."""

    seed: int
    faults: int
    steps: int

    @property
    def schedule(self) -> tuple[Fault, ...]:
        """The faults."""
        return fault_schedule(self.seed, self.faults, self.steps, TRAJECTORIES)


IN_CI = ChaosSettings(seed=3, faults=4, steps=6)
ON_DEMAND = [ChaosSettings(seed, faults=6, steps=40) for seed in range(17, 27)]
"""Together they send every signal to every target."""
