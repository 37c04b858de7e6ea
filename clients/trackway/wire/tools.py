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
    """Names of tools without state between calls; for these the one-shot route needs a fourth of the requests."""


class CreateInstance(WireRequest):
    """Create one tool's state for one trajectory."""

    tool: str = Field(max_length=128)
    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """The trajectory; its instances are listed and released by it."""
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

    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ToolResult(WireReply):
    """The result of a call: text for the model, a step reward, and metrics."""

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
    """`stuck`: its cancelled call has not stopped; no other call can use the instance, and it is released when that
    call ends."""
    age_s: float
    idle_s: float
    """Seconds since its last call ended; 0 while one runs."""


class InstanceList(WireReply):
    """The instances of one replica, oldest first."""

    instances: list[InstanceInfo]
    total: int
    """Instances of the replica, those beyond the request's limit included."""


class SessionReleased(WireReply):
    """How the release of a trajectory's instances went."""

    released: int
    failed: list[str] = Field(default_factory=list)
    """One message for each instance that could not be released cleanly."""
