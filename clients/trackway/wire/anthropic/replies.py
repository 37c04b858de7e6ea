"""Replies of Anthropic's Messages API and the events of their streams, with vLLM's names for additional fields."""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply
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


class AnthropicError(WireReply):
    """Our error, with Anthropic's type."""

    type: str
    message: str
    code: str
    retryable: bool
    detail: dict[str, JsonValue] = Field(default_factory=dict)


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
