"""How old rollouts are that were sampled before a run was resumed.

A run that is resumed publishes the weights of its checkpoint again, as the store's next version. Meanwhile other
versions may have been published: by this run after its checkpoint, or by another run. So the distance between two
versions of the store is not the number of updates between them.
"""

from typing import NamedTuple

from pydantic import BaseModel

from trackway.wire.trajectory import TokenRow, Trajectory, WeightSpan


class Republication(NamedTuple):
    """The weights of a checkpoint, published again."""

    saved: int
    """The newest version when the checkpoint was written."""
    version: int
    """The version published from the checkpoint."""


class WeightVersions(BaseModel):
    """The versions that a run has published, as part of its checkpoint."""

    newest: int | None = None
    """None before the first publication."""
    republications: tuple[Republication, ...] = ()
    """One for each time that the run was resumed."""

    def published(self, version: int, resumed: bool) -> "WeightVersions":
        """With `version` as the newest; `resumed` for the first publication of a process."""
        if self.newest is None or not resumed:
            return self.model_copy(update={"newest": version})
        again = Republication(self.newest, version)
        return WeightVersions(newest=version, republications=(*self.republications, again))

    def renumbered(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the versions that its weights would have if all were published by this process."""
        further = [row.model_copy(update={"weight_versions": self._spans(row)}) for row in trajectory.further_rows]
        spans = self._spans(trajectory)
        if spans == trajectory.weight_versions and further == trajectory.further_rows:
            return trajectory
        return trajectory.model_copy(update={"weight_versions": spans, "further_rows": further})

    def _spans(self, row: Trajectory | TokenRow) -> list[WeightSpan]:
        return [
            span.model_copy(
                update={
                    "version": self._number(span.version),
                    "kv_version": None if span.kv_version is None else self._number(span.kv_version),
                }
            )
            for span in row.weight_versions
        ]

    def _number(self, version: int) -> int:
        for saved, again in self.republications:
            if version <= saved:
                version += again - saved
        return version
