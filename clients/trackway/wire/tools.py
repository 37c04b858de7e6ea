"""The tool server: create, execute, reward, release; one-shot calls; and the operators' view."""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.chat import ToolSchema

MAX_SESSION_CHARS = 512
"""Most characters of a session id, usually a trajectory's, whose run and index may each have 128."""


class ToolList(WireReply):
    """Every tool as an OpenAI function schema."""

    tools: list[ToolSchema]
    stateless: list[str] = Field(default_factory=list[str])
    """Tools without state between calls. One-shot calls of these need a quarter of the requests."""


class CreateInstance(WireRequest):
    """Create one tool's state for one trajectory."""

    tool: str = Field(max_length=128)
    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """Id of the trajectory, by which its instances are listed and released."""
    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """The dataset row's `extra_info.tools_kwargs.<tool>.create_kwargs`."""


class InstanceCreated(WireReply):
    """The handle of a new instance."""

    instance_id: str
    tool: str


class ExecuteRequest(WireRequest):
    """One call of an instance."""

    arguments: dict[str, JsonValue]
    tool_call_id: str | None = None
    execute_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class RewardRequest(WireRequest):
    """Ask for an instance's reward."""

    calc_reward_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ReleaseRequest(WireRequest):
    """Release an instance."""

    release_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class OneShotRequest(ExecuteRequest, RewardRequest, ReleaseRequest):
    """Create, execute, reward and release in one request."""

    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """Id of the trajectory, whose run takes a fair share of the tool's slots."""
    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ToolResult(WireReply):
    """The result of a call: text for the model, a step reward, and metrics."""

    text: str
    reward: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)


class OneShotResult(ToolResult):
    """The result of a one-shot call, with the reward of its temporary instance."""

    instance_reward: float


class ToolReward(WireReply):
    """The reward of an instance over its whole life."""

    reward: float


class InstanceInfo(WireReply):
    """An instance as operators see it."""

    instance_id: str
    tool: str
    session_id: str | None
    state: Literal["creating", "idle", "busy", "stuck", "released"]
    """`stuck`: its cancelled call has not stopped. The instance cannot be used, and is released when that call ends."""
    age_s: float
    idle_s: float
    """Seconds since its last call ended. 0 while one runs."""


class InstanceList(WireReply):
    """The instances of one replica, oldest first."""

    instances: list[InstanceInfo]
    total: int
    """Number of instances of the replica, including those beyond the request's limit."""


class SessionReleased(WireReply):
    """The result of releasing a trajectory's instances."""

    released: int
    failed: list[str] = Field(default_factory=list[str])
    """One message for each instance that could not be released cleanly."""
