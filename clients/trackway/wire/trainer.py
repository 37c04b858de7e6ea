"""The trainer service: start a run (202), watch it, stop it, resume it."""

from enum import StrEnum

from pydantic import Field, JsonValue

from trackway.wire.base import PolicyName, RunName, WireReply, WireRequest
from trackway.wire.service import OwnCode, Wait


class RunState(StrEnum):
    """The states of a run. RUN_TRANSITIONS lists the transitions."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    """The learner died and is being restarted from the last checkpoint."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Stopped on request, with a checkpoint to resume from."""
    FINISHED = "finished"
    FAILED = "failed"
    UNREADABLE = "unreadable"
    """The state file is unreadable and no process owns the run. `message` has reason and remedy. Never stored."""


RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.FINISHED, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.RESTARTING: frozenset({RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED}),
    RunState.STOPPED: frozenset({RunState.STARTING, RunState.FAILED}),
    RunState.FINISHED: frozenset({RunState.STARTING}),  # with more steps
    RunState.FAILED: frozenset({RunState.STARTING, RunState.FAILED}),
    RunState.UNREADABLE: frozenset({RunState.STARTING, RunState.FAILED}),
}

ENDED = frozenset({RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.UNREADABLE})


class RunRequest(WireRequest):
    """Start a run with a resolved configuration in verl's vocabulary."""

    config: dict[str, JsonValue]
    run: RunName | None = None
    """Name of the run and of its folder. None takes `trainer.experiment_name`."""


class ResumeRequest(WireRequest):
    """Resume a run from its last checkpoint."""

    changes: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """New values by key of verl's vocabulary: more steps, ranks of the learner, their nodes, and how much each computes
    and holds. Other keys are refused."""


class PolicyRequest(WireRequest):
    """Make a checkpoint a policy of the rollout service."""

    name: PolicyName
    """A run and a step of its checkpoints: `demo:8`."""


class TraceSummary(WireReply):
    """Traced trajectories of a run, and span counts of all processes of the deployment in that time."""

    trajectories: int = 0
    """Traced trajectories, including validation."""
    bytes: int = 0
    """Bytes of their spans and of the trainer's own, before compression."""
    spans_dropped: int = 0
    """Spans dropped because a queue or a spool was full, or a service lacked their backend."""
    spans_refused: int = 0
    """Spans that a backend rejected permanently."""
    spans_waiting: int = 0
    """Spans not sent yet, or not sent when the run ended."""
    spool_bytes: int = 0
    """Bytes of waiting spans on disk."""
    unknown: list[str] = Field(default_factory=list[str])
    """Services that did not report their span counts."""

    @property
    def spans_lost(self) -> int:
        """Spans that were lost for at least one backend."""
        return self.spans_dropped + self.spans_refused


class BackendSummary(WireReply):
    """Metrics and feedback of a run that a backend has not received."""

    backend: str
    """`mlflow`, `weave`, `wandb` or `tensorboard`."""
    rows_waiting: int = 0
    """Rows of metrics waiting on disk."""
    feedback_waiting: int = 0
    """Feedback values, and links of traces to the run, waiting on disk."""
    end_waiting: bool = False
    """True if the end of the run still has to be sent."""
    metrics_lost: int = 0
    """Metric values that the backend refused or that exceeded the queue's limit."""
    feedback_lost: int = 0
    """Feedback values that the backend refused, that exceeded the queue's limit, or whose trace did not arrive."""
    waits_for: str = ""
    """Why values wait. Empty if nothing prevents sending."""
    lost_because: str = ""
    """Reason of the most recent loss."""

    @property
    def waiting(self) -> bool:
        """Return whether anything still has to be sent."""
        return self.end_waiting or self.rows_waiting > 0 or self.feedback_waiting > 0

    @property
    def lost(self) -> int:
        """Lost values."""
        return self.metrics_lost + self.feedback_lost


class RunInfo(WireReply):
    """The status of a run."""

    run: str
    uid: str = ""
    """Distinguishes this run from others of the same name. Kept when the run is resumed."""
    state: RunState
    step: int = 0
    total_steps: int = 0
    restarts: int = 0
    """Automatic restarts, after the process died or was interrupted."""
    interrupted: bool = False
    """True if the run stopped or failed because its service or machine was lost, and not on request or by an error of
    its own."""
    message: str = ""
    folder: str = ""
    policy: str | None = None
    """Policy of the rollout service that it trains. None is the default one."""
    mlflow_uri: str | None = None
    experiment_id: str | None = None
    run_id: str | None = None
    """MLflow's id of this run."""
    weave_url: str | None = None
    """Page of the Weave project of its traces, `https://wandb.ai/<entity>/<project>`. None without traces there."""
    threads: int | None = None
    """CPU threads of the learner, kept when the run is resumed. None until it has loaded its model."""
    engine_threads: int | None = None
    """CPU threads of the rollout engine when the run was started or resumed, or None without torch there."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """The newest value of each metric."""
    traces: TraceSummary | None = None
    """None if the run is not traced."""
    code: dict[str, OwnCode] = Field(default_factory=dict)
    """The own code that each service had loaded when the run was started or resumed last, by service."""
    tracking: list[BackendSummary] = Field(default_factory=list[BackendSummary])
    """Unsent and lost values, one entry for each backend that the run uses."""
    waits: list[Wait] = Field(default_factory=list[Wait])
    """Waits of an active run that have lasted seconds."""
    rollout_states: dict[str, int] = Field(default_factory=dict)
    """Rollouts for training by state. Those other than `submitted` sum to it: `running`, `finished` (and not trained
    yet), `used`, `dropped_failed`, `dropped_infrastructure`, `dropped_filtered`, `dropped_stale`, `baseline`
    (greedy rollouts of remax), and `cancelled` (by a stop, until the run is resumed)."""

    @property
    def progress(self) -> str:
        """The step, and how many there will be if that is known, such as `3 of 30`."""
        return f"{self.step} of {self.total_steps}" if self.total_steps else f"{self.step}"


class RunList(WireReply):
    """All runs in the service's outputs folder."""

    runs: list[RunInfo]


class MetricsRow(WireReply):
    """The metrics of one step; one line of `metrics.jsonl` and of the metrics stream."""

    step: int
    timestamp: int = 0
    """End of the step in milliseconds since 1970. 0 if not recorded."""
    data: dict[str, float]
