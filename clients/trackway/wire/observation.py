"""verl-tool's protocol: a batch of model outputs in, the tools' observations out."""

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from trackway.wire.base import WireReply
from trackway.wire.tools import MAX_SESSION_CHARS

MAX_ACTIONS = 4096
_ENTRIES = Field(max_length=MAX_ACTIONS, fail_fast=True)


def _as_text(value: object) -> object:
    """verl-tool's own rollouts number their trajectories."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


TrajectoryId = Annotated[str, BeforeValidator(_as_text), Field(max_length=MAX_SESSION_CHARS)]
"""Text, or a whole number, which is equal to its digits as text."""


class ObservationRequest(BaseModel):
    """One action for each trajectory. All lists given have the same length. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    trajectory_ids: list[TrajectoryId] = Field(min_length=1, max_length=MAX_ACTIONS, fail_fast=True)
    actions: list[str] = Field(max_length=MAX_ACTIONS, fail_fast=True)
    """The model's output, which contains the tool call."""
    extra_fields: Annotated[list[dict[str, JsonValue]], _ENTRIES] | None = None
    """The dataset rows' `extra_info`. `tools_kwargs.<tool>.create_kwargs` and `.execute_kwargs` are used."""
    finish: Annotated[list[bool], _ENTRIES] | None = None
    """True if the trajectory is over: its tools are released and its action is ignored."""
    is_last_step: Annotated[list[bool], _ENTRIES] | None = None
    """True if the trajectory's tools are released after this action."""

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        lists = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        lengths = {name: len(value) for name, value in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"expected lists of one length, got {lengths}")
        return self


class DetailedObservation(WireReply):
    """An observation with further fields."""

    obs: str
    """Text for the model."""
    reward: float | None = None
    """The step reward of the calls, where it is not 0."""
    invalid_reason: str | None = None
    available_tools: str | None = None
    error: str | None = None
    """An error of the server. The trajectory cannot continue."""
    tool_type: str | None = None


class ObservationReply(WireReply):
    """One entry per trajectory, in the order of the request."""

    observations: list[str | DetailedObservation]
    dones: list[bool]
    valids: list[bool]
    """True if the action contained a valid call, which was executed."""
    processing_time_ms: float
