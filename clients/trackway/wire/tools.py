"""The tool server: create, execute, calculate the reward, release; and a one-shot call."""

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply, WireRequest
from trackway.wire.chat import ToolSchema


class ToolList(WireReply):
    """Every tool as an OpenAI function schema."""

    tools: list[ToolSchema]
    stateless: list[str] = Field(default_factory=list)
    """Names of tools that keep nothing between calls: the one-shot route does for them, at a fourth of the requests."""


class CreateInstance(WireRequest):
    """Make one tool's state for one trajectory."""

    tool: str
    session_id: str | None = None
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


class OneShotRequest(ExecuteRequest):
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
