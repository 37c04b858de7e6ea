"""The tool server: create, execute, calculate the reward, release; a one-shot call; and what operators see."""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.chat import ToolSchema

MAX_SESSION_CHARS = 512
"""Of a session's id: a trajectory's, whose run and row may each have 128."""


class ToolList(WireReply):
    """Every tool as an OpenAI function schema."""

    tools: list[ToolSchema]
    stateless: list[str] = Field(default_factory=list)
    """Names of tools that keep nothing between calls: the one-shot route does for them, at a fourth of the requests."""


class CreateInstance(WireRequest):
    """Make one tool's state for one trajectory."""

    tool: str = Field(max_length=128)
    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """The trajectory; its instances are listed and released by it."""
    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """What the dataset row gives under `extra_info.tools_kwargs.<tool>.create_kwargs`."""


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
    """Give an instance back."""

    release_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class OneShotRequest(ExecuteRequest, RewardRequest, ReleaseRequest):
    """Create, execute, reward and release in one request."""

    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ToolResult(WireReply):
    """What a call gave: text for the model, a step reward, and metrics."""

    text: str
    reward: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)


class ToolReward(WireReply):
    """The reward of an instance over its whole life."""

    reward: float


class InstanceInfo(WireReply):
    """What an operator sees of an instance."""

    instance_id: str
    tool: str
    session_id: str | None
    state: Literal["creating", "idle", "busy", "stuck", "released"]
    """`stuck`: its call was told to stop and does not; no call can use it, and it is released when the call ends."""
    age_s: float
    idle_s: float
    """Seconds since its last call ended; 0 while one runs."""


class InstanceList(WireReply):
    """The instances of one replica, oldest first."""

    instances: list[InstanceInfo]
    total: int
    """How many there are, also those beyond the limit of the request."""


class SessionReleased(WireReply):
    """What became of a trajectory's instances."""

    released: int
    failed: list[str] = Field(default_factory=list)
    """One message for each instance that could not be released cleanly."""
