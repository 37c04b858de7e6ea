"""What a run will do and how far it is."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from trackway.trainer.data.dataset import Position
from trackway.wire.base import NON_FINITE
from trackway.wire.trainer import MetricValue


class Progress(BaseModel):
    """What a checkpoint says beside the learner's state."""

    model_config = ConfigDict(ser_json_inf_nan=NON_FINITE)

    step: int = 0
    """Steps whose update is done."""
    position: Position = Field(default_factory=Position)
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    """Of that step, in case the process ends before their row is written."""
    unvalidated: dict[str, MetricValue] = Field(default_factory=dict)
    """Of that step, when a stop has cut off its validation; they and it make its row."""


@dataclass(frozen=True)
class Schedule:
    """When what happens; steps count from 1."""

    total_steps: int
    seed: int
    val_before_train: bool = True
    test_freq: int = -1
    save_freq: int = -1
    keep_checkpoints: int | None = None
    traced_prompts: int = 0
    traced_validation: int = 0
    rollouts: int = 1
    """Of each prompt."""
    validation_n: int = 1
    max_staleness: int | None = None
    max_prompt_length: int = 512
    storage_wait_s: float = 600.0
    """For a disk that is full or cannot be written."""
    gpus: int = 1
    """Of the whole run, which throughput is divided by."""
