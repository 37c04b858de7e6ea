"""Requests and replies of Anthropic's Messages API, with vLLM's names for additional fields."""

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from trackway.wire.base import Int, WireReply, WireRequest
from trackway.wire.chat import MAX_MESSAGES, MAX_TOOLS
from trackway.wire.errors import ErrorBody
from trackway.wire.openai import EchoedPart, GenerationRequest, OpenAIRequest, check_tool_choice
from trackway.wire.trajectory import WeightSpan

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(WireReply):
    """Text."""

    type: Literal["text"] = "text"
    text: str


class ToolUseBlock(WireReply):
    """A call that the client is to make."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, JsonValue]


ContentBlock = TextBlock | ToolUseBlock


class MessagesUsage(WireReply):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesReply(WireReply):
    """One message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    """The stop sequence that ended the message."""
    usage: MessagesUsage
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, as the next two; in a stream, in `message_delta`."""
    token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class CountTokensReply(WireReply):
    """The prompt's length."""

    input_tokens: int


class MessageStartEvent(WireReply):
    """The message, without content."""

    type: Literal["message_start"] = "message_start"
    message: MessagesReply


class PingEvent(WireReply):
    """The stream is alive."""

    type: Literal["ping"] = "ping"


class ContentBlockStartEvent(WireReply):
    """A block begins, empty."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ContentBlock


class TextDelta(WireReply):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class InputJsonDelta(WireReply):
    """The input of a call as JSON, always complete."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ContentBlockDeltaEvent(WireReply):
    """More of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStopEvent(WireReply):
    """A block is complete."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(WireReply):
    """Why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDeltaEvent(WireReply):
    """The end of the message."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessagesUsage
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class MessageStopEvent(WireReply):
    """The end of the stream."""

    type: Literal["message_stop"] = "message_stop"


class AnthropicError(ErrorBody):
    """Our error, with Anthropic's type."""

    type: str


class AnthropicErrorReply(WireReply):
    """The body of an error, and the last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: AnthropicError


MessagesEvent = (
    MessageStartEvent
    | PingEvent
    | ContentBlockStartEvent
    | ContentBlockDeltaEvent
    | ContentBlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
    | AnthropicErrorReply
)


class TextBlockParam(EchoedPart):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlockParam(EchoedPart):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


class ToolResultBlockParam(EchoedPart):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlockParam], Field(fail_fast=True)] = ""
    is_error: bool = False


class ThinkingBlockParam(EchoedPart):
    """The model's reasoning, which is passed to the chat template."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlockParam(EchoedPart):
    """Encrypted reasoning of another model; no effect."""

    type: Literal["redacted_thinking"]


ContentBlockParam = Annotated[
    TextBlockParam | ToolUseBlockParam | ToolResultBlockParam | ThinkingBlockParam | RedactedThinkingBlockParam,
    Discriminator("type"),
]
"""Other blocks (images, documents, server tools) are refused."""


class MessageParam(WireRequest):
    """One message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlockParam], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> "MessageParam":
        of_model = ("tool_use", "thinking", "redacted_thinking")
        for block in self.content if not isinstance(self.content, str) else []:
            fits = (
                block.type == "text"
                or (self.role == "assistant" and block.type in of_model)
                or (self.role == "user" and block.type == "tool_result")
            )
            if not fits:
                got = {"role": self.role, "kind": block.type}
                raise PydanticCustomError("block", "expected no {kind} in a message of role {role}", got)
        return self


class MessagesTool(EchoedPart):
    """A tool that the model may call. Anthropic's server tools are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue]


class MessagesToolChoice(WireRequest):
    """The tool that the model must, can or cannot call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool, with `type: tool`."""
    disable_parallel_tool_use: bool = False
    """Keeps only the first call."""


class OutputFormat(OpenAIRequest):
    """A JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(OpenAIRequest):
    """Options of the output."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"task_budget"})
    neutral: ClassVar[dict[str, list[JsonValue]]] = {}

    format: OutputFormat | None = None
    """Guides the sampling, where the engine can."""

    effort: str | None = Field(default=None, max_length=64)
    """Passed to the chat template as `reasoning_effort`."""


class CountTokensRequest(OpenAIRequest):
    """A conversation."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "cache_control",
            "context_management",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "thinking",
            "user_profile_id",
            "workspace_id",
        }
    )
    neutral: ClassVar[dict[str, list[JsonValue]]] = {"container": [], "mcp_servers": [[]], "output_format": []}

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlockParam], Field(max_length=1024, fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list[MessagesTool]
    )
    tool_choice: MessagesToolChoice = Field(default_factory=lambda: MessagesToolChoice(type="auto"))
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _choice_among_the_tools(self) -> "CountTokensRequest":
        choice, names = self.tool_choice, [tool.name for tool in self.tools]
        is_named = choice.type == "tool"
        check_tool_choice(names, str(choice.name) if is_named else choice.type, is_named=is_named)
        return self


class MessagesRequest(GenerationRequest, CountTokensRequest):
    """The next message of a conversation."""

    max_tokens: Int = Field(ge=1)
    """More than the model's context has room for is the same as all of it."""
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=256, fail_fast=True),
    ] = Field(default_factory=list[str])
