"""How far a run is, in steps and in trajectories of the step under way."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.fault_schedule import Moment

_NOT_DELIVERED = "aborted"


@dataclass
class StepProgress:
    """Counts the trajectories that ended since a step began, from the agent's count of all of them."""

    step: int = -1
    _base: int = 0

    def trajectories(self, step: int, ended: int) -> int:
        """Those of the step under way, when `step` steps are done and the agent has counted `ended` in all.

        The first look at a step begins its count. A new replica of the agent counts from 0.
        """
        if step != self.step:
            self.step, self._base = step, ended
        self._base = min(self._base, ended)
        return ended - self._base

    def has_reached(self, moment: Moment, step: int, ended: int | None) -> bool:
        """Whether the moment is there or has passed; `ended` is None while the agent does not answer."""
        if step != moment.step:
            return step > moment.step
        return moment.trajectories == 0 or (ended is not None and self.trajectories(step, ended) >= moment.trajectories)


def ended_trajectories(exposition: str) -> int:
    """The training trajectories that an agent replica has delivered, from its `/metrics`."""
    families = {family.name: family for family in text_string_to_metric_families(exposition)}
    samples = families["trackway_trajectories"].samples if "trackway_trajectories" in families else []
    wanted = [s for s in samples if s.labels["kind"] == "training" and s.labels["outcome"] != _NOT_DELIVERED]
    return int(sum(sample.value for sample in wanted))
