"""Converts results between MCP and ours. `trackway/...` keys in `_meta` carry what MCP has no field for."""

from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import to_json

from trackway.tools.base import ToolInputError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ToolResult


class _Meta(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True, alias_generator=lambda name: f"trackway/{name}")

    def to_wire(self) -> dict[str, JsonValue]:
        """The keys that are set."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class RequestMeta(_Meta):
    """`_meta` of a call."""

    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """For the tool's state, created at the session's first call of the tool."""
    execute_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    want_reward: bool = False
    """True to return the instance's reward so far."""


class ResultMeta(_Meta):
    """`_meta` of a result."""

    reward: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
    instance_id: str | None = None
    instance_reward: float | None = None
    error: ErrorCode | None = None
    """The code of a failed call."""


def to_mcp(result: ToolResult, meta: ResultMeta) -> CallToolResult:
    """Our result in MCP's format."""
    return CallToolResult(content=[TextContent(text=result.text)], _meta=meta.to_wire())


def to_mcp_error(error: TrackwayError) -> CallToolResult:
    """A failed call in MCP's format: the message is for the model, the code is in `_meta`."""
    return CallToolResult(
        content=[TextContent(text=error.message)],
        is_error=True,
        _meta=ResultMeta(error=error.code).to_wire(),
    )


def meta_of(result: CallToolResult) -> ResultMeta:
    """Our keys of `_meta`. Invalid ones of another server are ignored."""
    try:
        return ResultMeta.model_validate(result.meta or {})
    except ValidationError:
        return ResultMeta()


def from_mcp(tool: str, result: CallToolResult) -> ToolResult:
    """An MCP server's result in our format.

    An error result is the call's fault and becomes an observation: ToolInputError. An error of another Trackway server
    keeps its code.
    """
    meta = meta_of(result)
    text = "\n".join(_shown(part) for part in result.content)
    if not text and result.structured_content is not None:
        text = to_json(result.structured_content).decode()
    if result.is_error and meta.error is not None:
        raise TrackwayError(meta.error, text, tool=tool)
    if result.is_error:
        raise ToolInputError(text or f"{tool}: the call failed without a reason from the server", tool=tool)
    return ToolResult(text=text, reward=meta.reward, metrics=meta.metrics)


def _shown(part: object) -> str:
    match part:
        case TextContent():
            return part.text
        case ImageContent() | AudioContent():
            return f"[{part.type}: {part.mime_type}]"
        case ResourceLink():
            return f"[resource: {part.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case EmbeddedResource():
            return f"[resource: {part.resource.uri}]"
        case _:
            return f"[{type(part).__name__}]"
