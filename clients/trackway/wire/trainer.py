"""The trainer service: start a run (202), watch it, stop it, resume it."""

import math
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.names import RunName


class RunState(StrEnum):
    """The life of a run; RUN_TRANSITIONS says what may follow what."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    """The learner's process died and is started again from the last checkpoint."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Ended on request, with a resumable checkpoint."""
    FINISHED = "finished"
    FAILED = "failed"
    UNREADABLE = "unreadable"
    """Its state file cannot be read and no process has it: `message` says why, and how to go on. Never written."""


RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.FINISHED, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.RESTARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED}),
    RunState.STOPPED: frozenset({RunState.STARTING, RunState.FAILED}),
    RunState.FINISHED: frozenset(),
    RunState.FAILED: frozenset({RunState.STARTING, RunState.FAILED}),
    RunState.UNREADABLE: frozenset({RunState.STARTING, RunState.FAILED}),
}

ENDED = frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.UNREADABLE})


def _null_as_nan(value: object) -> object:
    return math.nan if value is None else value


MetricValue = Annotated[float, BeforeValidator(_null_as_nan)]
"""The value of a metric, which may be NaN or infinite; files of earlier versions have null for both."""


class RunRequest(WireRequest):
    """Start a run with a resolved configuration in verl's vocabulary."""

    config: dict[str, JsonValue]
    run: RunName | None = None
    """The run's name and its folder under the outputs; None takes `trainer.experiment_name`."""


class TraceSummary(WireReply):
    """What a run traced, and what happened to the spans of every process of the deployment meanwhile."""

    trajectories: int = 0
    """Traced trajectories, validation included."""
    bytes: int = 0
    """Bytes of their spans and of the trainer's own, before compression."""
    spans_dropped: int = 0
    """Spans dropped because a queue or a spool was full, or a service did not know their backend."""
    spans_refused: int = 0
    """Spans that a backend rejected permanently."""
    spans_waiting: int = 0
    """Spans not yet sent, now or when the run ended."""
    spool_bytes: int = 0
    """Bytes of these on disk."""
    unknown: list[str] = Field(default_factory=list)
    """Services that did not report their spans."""

    @property
    def spans_lost(self) -> int:
        """Spans that some backend will never have."""
        return self.spans_dropped + self.spans_refused


class BackendSummary(WireReply):
    """What a backend of metrics or feedback lacks of a run."""

    backend: str
    """`mlflow`, `weave`, `wandb` or `tensorboard`."""
    rows_waiting: int = 0
    """Rows of metrics that wait on disk."""
    feedback_waiting: int = 0
    """Values of feedback that wait on disk."""
    end_waiting: bool = False
    """Whether the end of the run has not been sent yet."""
    metrics_lost: int = 0
    """Values of metrics that it refused, or that found no room."""
    feedback_lost: int = 0
    """Values of feedback that it refused, that found no room, or whose trace did not arrive."""
    waits_for: str = ""
    """Why values wait; empty when nothing prevents sending them."""
    lost_because: str = ""
    """Why the most recent loss happened."""

    @property
    def waiting(self) -> bool:
        """Whether anything will still be sent."""
        return self.end_waiting or self.rows_waiting > 0 or self.feedback_waiting > 0

    @property
    def lost(self) -> int:
        """Values that it will never have."""
        return self.metrics_lost + self.feedback_lost


class RunInfo(WireReply):
    """Where a run stands."""

    run: str
    uid: str = ""
    """Tells this run from others of the same name; kept when the run is resumed."""
    state: RunState
    step: int = 0
    total_steps: int = 0
    restarts: int = 0
    """Automatic restarts: its process died, or was interrupted and the service resumes interrupted runs."""
    interrupted: bool = False
    """Whether it is stopped or failed because its service or machine was lost, neither on request nor by an error of
    its own."""
    message: str = ""
    folder: str = ""
    mlflow_uri: str | None = None
    experiment_id: str | None = None
    run_id: str | None = None
    """MLflow's id of this run."""
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    """The newest value of each metric."""
    traces: TraceSummary | None = None
    """None when the run traces nothing."""
    tracking: list[BackendSummary] = Field(default_factory=list)
    """What MLflow, Weave, W&B and TensorBoard do not have of the run, one entry for each that it uses."""


class RunList(WireReply):
    """Every run that this service knows."""

    runs: list[RunInfo]


class MetricsRow(WireReply):
    """The metrics of one step; one line of `metrics.jsonl` and of the metrics stream."""

    step: int
    timestamp: int = 0
    """Milliseconds since 1970 when the step ended; 0 where it was not recorded."""
    data: dict[str, MetricValue]
