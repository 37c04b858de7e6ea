"""The schedule and the progress of a run."""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from trackway.trainer.data.dataset import Position
from trackway.trainer.loop.scheduler import SchedulerState
from trackway.wire.base import NON_FINITE
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import TokenRow, Trajectory, WeightSpan


class Republication(NamedTuple):
    """The weights of a checkpoint, published again."""

    saved: int
    """The newest version when the checkpoint was written."""
    version: int
    """The version published from the checkpoint."""


class WeightVersions(BaseModel):
    """The versions that a run has published, as part of its checkpoint.

    A run that is resumed publishes the weights of its checkpoint again, as the store's next version. Meanwhile other
    versions may have been published: by this run after its checkpoint, or by another run. So the distance between two
    versions of the store is not the number of updates between them.
    """

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


class OpenValidation(BaseModel):
    """A validation that runs while training goes on, and is not complete."""

    step: int
    """The step whose weights are validated."""
    version: int
    """These weights, as published."""


class Progress(BaseModel):
    """The part of a checkpoint that is not the learner's state."""

    model_config = ConfigDict(ser_json_inf_nan=NON_FINITE)

    step: int = 0
    """Steps whose update is done."""
    position: Position = Field(default_factory=Position)
    """The batch of the next step. With groups submitted ahead it tells the size of the step and its epoch."""
    scheduler: SchedulerState = Field(default_factory=SchedulerState)
    """Groups that were submitted and not trained."""
    versions: WeightVersions = Field(default_factory=WeightVersions)
    """The published weights, by which the staleness of these groups is counted."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics of that step, in case the process ends before the row is written."""
    unvalidated: dict[str, float] = Field(default_factory=dict)
    """Metrics of that step when a stop interrupted its validation. The row is written after that validation."""
    validation: OpenValidation | None = None
    rows: list[MetricsRow] = Field(default_factory=list[MetricsRow])
    """The row of the step that is validated and those after it, in order. Written when the validation is complete."""


@dataclass(frozen=True)
class Schedule:
    """Events by step. Steps count from 1."""

    total_steps: int
    seed: int
    val_before_train: bool = True
    test_freq: int = -1
    save_freq: int = -1
    keep_checkpoints: int | None = None
    copies_url: str | None = None
    """fsspec URL of the folder that gets a copy of each checkpoint, or None for no copies."""
    async_save: bool = True
    """True if steps go on while a checkpoint is written."""
    traced_prompts: int = 0
    traced_validation: int = 0
    rollouts: int = 1
    """Rollouts of each prompt, a greedy one included."""
    validation_n: int = 1
    max_staleness: int | None = None
    max_prompt_length: int = 512
    storage_wait_s: float = 600.0
    """Longest wait for a disk that is full or not writable."""
    gpus: int = 1
    """GPUs of the whole run. Throughput is per GPU."""
