"""Messages, tool calls and tool schemas in the OpenAI chat format."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from trackway.wire.base import WireReply

MAX_MESSAGES = 16_384
"""Most messages of one conversation."""
MAX_TOOLS = 1024
"""Most tools offered in one conversation."""

Role = Literal["system", "user", "assistant", "tool"]


class FunctionCall(WireReply):
    """A function's name and its arguments as a JSON string, as the model wrote them."""

    name: str
    arguments: str


class ToolCall(WireReply):
    """One tool call requested by the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(WireReply):
    """One chat message."""

    role: Role
    content: str
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionSchema(WireReply):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)


class ToolSchema(WireReply):
    """A tool as OpenAI's chat format lists it."""

    type: Literal["function"] = "function"
    function: FunctionSchema


class ChatModelSettings(BaseModel):
    """A model behind a server with OpenAI's chat completions."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    base_url: str = Field(pattern=r"^https?://[^@]+$")
    """URL of the API to its version, `https://host/v1`."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Name of the environment variable with the API key."""
    sends_seed: bool = True
    """Send a seed with each request above temperature 0. Some servers refuse it."""
