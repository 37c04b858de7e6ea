"""Responses of OpenAI's Responses API and the events of their streams, with vLLM's names for additional fields."""

from typing import Literal

from pydantic import Field, JsonValue

from trackway.wire.base import WireReply
from trackway.wire.openai.replies import ChatLogprob
from trackway.wire.openai.response_requests import ReasoningOptions, ResponseTool, ResponseToolChoice
from trackway.wire.trajectory import WeightSpan

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(WireReply):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[JsonValue] = Field(default_factory=list[JsonValue])
    logprobs: list[ChatLogprob] = Field(default_factory=list[ChatLogprob])
    """With `include: ["message.output_text.logprobs"]`, an entry for each token."""


class OutputMessage(WireReply):
    """A message by the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputFunctionCall(WireReply):
    """A call that the client is to make."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputFunctionCall


class CachedTokens(WireReply):
    """Part of the input tokens."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ReasoningTokens(WireReply):
    """Part of the output tokens."""

    reasoning_tokens: int = 0


class ResponsesUsage(WireReply):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens = Field(default_factory=CachedTokens)
    output_tokens: int
    output_tokens_details: ReasoningTokens = Field(default_factory=ReasoningTokens)
    total_tokens: int


class IncompleteDetails(WireReply):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseText(WireReply):
    """Options of the text."""

    format: dict[str, JsonValue]
    """The format of the request."""


class ResponsesReply(WireReply):
    """One response. Null fields are sent, as by OpenAI."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] = Field(default_factory=dict)
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool = False
    reasoning: ReasoningOptions | None
    temperature: float
    text: ResponseText
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice
    tools: list[ResponseTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, as the next two."""
    token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class ResponsesEvent(WireReply):
    """One event of a stream."""

    sequence_number: int


class ResponseStateEvent(ResponsesEvent):
    """The response at its beginning and at its end."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"]
    response: ResponsesReply


class OutputItemEvent(ResponsesEvent):
    """An item begins or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _PartEvent(ResponsesEvent):
    item_id: str
    output_index: int


class ContentPartEvent(_PartEvent):
    """A text part begins or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int = 0
    part: OutputText


class OutputTextDeltaEvent(_PartEvent):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: int = 0
    delta: str
    logprobs: list[ChatLogprob] = Field(default_factory=list[ChatLogprob])


class OutputTextDoneEvent(_PartEvent):
    """The whole text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: int = 0
    text: str
    logprobs: list[ChatLogprob] = Field(default_factory=list[ChatLogprob])


class ArgumentsDeltaEvent(_PartEvent):
    """The arguments of a call, always complete."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDoneEvent(_PartEvent):
    """The whole arguments."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


class ErrorEvent(ResponsesEvent):
    """The stream failed. `error` repeats the fields, as OpenAI's clients raise it."""

    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None
    error: dict[str, JsonValue]


AnyResponsesEvent = (
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDeltaEvent
    | OutputTextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent
)
