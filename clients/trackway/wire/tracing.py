"""Where a trace goes, and what can happen to its trajectory."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from trackway.wire.base import WireRequest


class TraceBackend(StrEnum):
    """Who can keep traces; verl's names, and `otlp` for any OpenTelemetry receiver."""

    MLFLOW = "mlflow"
    WEAVE = "weave"
    OTLP = "otlp"


HeaderText = Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,1024}$")]
"""What an HTTP header can carry: a target comes from outside and becomes headers."""


class TraceTarget(WireRequest):
    """Where a trace goes and what it carries; sent with each trace, since services outlive runs."""

    model_config = ConfigDict(frozen=True)

    backends: tuple[TraceBackend, ...] = Field(default=(), max_length=16, fail_fast=True)
    """One or several; none takes the services' own setting."""
    mlflow_experiment_id: HeaderText | None = None
    """MLflow experiment; None takes the services' own setting."""
    mlflow_run_id: HeaderText | None = None
    """MLflow run that the trace belongs to."""
    weave_project: HeaderText | None = Field(default=None, pattern="^[^/]+/[^/]+$")
    """`entity/project` of Weave; None takes the services' own setting."""
    wandb_run_id: str | None = Field(default=None, pattern="^[^/:]+$")
    """W&B run that a Weave trace is linked to: the bare id, of a run in the same project."""
    token2text: bool | None = None
    """Put decoded text on spans; None takes the services' own setting."""


class Incident(StrEnum):
    """Something that went wrong on the way of a trajectory and was survived, from mild to grave."""

    RETRIED = "retried"
    """A call was sent again and answered."""
    GENERATION_CUT = "generation_cut"
    """The engine cut a turn, which was then continued."""
    WEIGHTS_BEHIND = "weights_behind"
    """A replica had to catch up with the weights before it generated."""
    PROMPT_CUT = "prompt_cut"
    """The prompt was longer than its limit, and `limits.prompt_truncation` says to cut it."""
    TOOL_FAILED = "tool_failed"
    """A tool raised or refused the call; the model was told."""
    TOOL_TIMEOUT = "tool_timeout"
    """A tool took longer than its limit; the model was told."""
    INSTANCE_LOST = "instance_lost"
    """A tool's state was lost, and replayed on a new instance."""
    REPLICA_LOST = "replica_lost"
    """A service's process went away during a call, which was then sent to another."""
