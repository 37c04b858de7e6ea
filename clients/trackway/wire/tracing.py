"""The destination of a trace, and the incidents of a trajectory."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from trackway.wire.base import WireRequest


class TraceBackend(StrEnum):
    """Trace backends: verl's names, and `otlp` for any OpenTelemetry receiver."""

    MLFLOW = "mlflow"
    WEAVE = "weave"
    OTLP = "otlp"


HeaderText = Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,1024}$")]
"""Characters of an HTTP header: a target comes from outside and becomes headers."""


class TraceTarget(WireRequest):
    """The destination and the content of a trace. Sent with each trace, since services outlive runs."""

    model_config = ConfigDict(frozen=True)

    backends: tuple[TraceBackend, ...] = Field(default=(), max_length=16, fail_fast=True)
    """One or several backends. An empty list takes the service's setting."""
    mlflow_experiment_id: HeaderText | None = None
    """MLflow experiment. None takes the service's setting."""
    mlflow_run_id: HeaderText | None = None
    """MLflow run of the trace."""
    weave_project: HeaderText | None = Field(default=None, pattern="^[^/]+/[^/]+$")
    """Weave's `entity/project`. None takes the service's setting."""
    wandb_run_id: str | None = Field(default=None, pattern="^[^/:]+$")
    """W&B run to which Weave traces are linked: the bare id of a run in the same project."""
    token2text: bool | None = None
    """Put decoded text on spans. None takes the service's setting."""


class Incident(StrEnum):
    """A problem from which a trajectory recovered. The members are in order of severity."""

    RETRIED = "retried"
    """A call was sent again and answered."""
    GENERATION_CUT = "generation_cut"
    """The engine cut a turn, which was then continued."""
    WEIGHTS_BEHIND = "weights_behind"
    """A replica had to load newer weights before it generated."""
    PROMPT_CUT = "prompt_cut"
    """The prompt exceeded its limit and was truncated according to `limits.prompt_truncation`."""
    TOOL_FAILED = "tool_failed"
    """A tool raised or refused the call; the model saw the error."""
    TOOL_TIMEOUT = "tool_timeout"
    """A tool took longer than its limit; the model saw the error."""
    INSTANCE_LOST = "instance_lost"
    """A tool's state was lost, and replayed on a new instance."""
    REPLICA_LOST = "replica_lost"
    """The process of a service died during a call, and another one answered it."""
