"""The trainer service: start a run (202), watch it, stop it, resume it."""

from enum import StrEnum

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, WireRequest


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


RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.FINISHED, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.RESTARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED}),
    RunState.STOPPED: frozenset({RunState.STARTING, RunState.FAILED}),
    RunState.FINISHED: frozenset(),
    RunState.FAILED: frozenset({RunState.STARTING, RunState.FAILED}),
}

ENDED = frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED})


class RunRequest(WireRequest):
    """Start a run with a resolved configuration in verl's vocabulary."""

    config: dict[str, JsonValue]
    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """The run's name and its folder under the outputs; None takes `trainer.experiment_name`."""


class TraceSummary(WireReply):
    """What a run traced, and what became of its spans in every process of the deployment meanwhile."""

    trajectories: int = 0
    """Traced trajectories, validation included."""
    bytes: int = 0
    """Of their spans and of the trainer's own, before compression."""
    spans_dropped: int = 0
    """There was no room for them, or a service did not know their backend."""
    spans_refused: int = 0
    """A backend said that it will never take them."""
    spans_waiting: int = 0
    """Not yet sent when the run ended, or now."""
    spool_bytes: int = 0
    """Of those, on disk."""
    unknown: list[str] = Field(default_factory=list)
    """Services that did not say what became of their spans."""

    @property
    def spans_lost(self) -> int:
        """Spans that some backend will never have."""
        return self.spans_dropped + self.spans_refused


class RunInfo(WireReply):
    """Where a run stands."""

    run: str
    uid: str = ""
    """Tells this run from another one of the same name elsewhere; kept when it is resumed."""
    state: RunState
    step: int = 0
    total_steps: int = 0
    restarts: int = 0
    """How often it went on by itself: its process died, or was interrupted and the service resumes such runs."""
    interrupted: bool = False
    """It is stopped or failed because its service or machine went, neither on request nor by an error of its own."""
    message: str = ""
    folder: str = ""
    mlflow_uri: str | None = None
    experiment_id: str | None = None
    run_id: str | None = None
    """MLflow's id of this run."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """The newest value of each metric."""
    traces: TraceSummary | None = None
    """None when the run traces nothing."""


class RunList(WireReply):
    """Every run that this service knows."""

    runs: list[RunInfo]


class MetricsRow(WireReply):
    """The metrics of one step; one line of `metrics.jsonl` and of the metrics stream."""

    step: int
    data: dict[str, float]
