"""OpenAI's Responses API: requests, replies and stream events, with vLLM's names for additional fields."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from trackway.wire.base import Int, WireReply, WireRequest
from trackway.wire.chat import MAX_MESSAGES, MAX_TOOLS
from trackway.wire.openai import ChatLogprob, EchoedPart, GenerationRequest, OpenAIRequest, check_tool_choice
from trackway.wire.rollout import MAX_TOP_LOGPROBS
from trackway.wire.trajectory import WeightSpan


class ResponseTextPart(EchoedPart):
    """A text part. Other kinds (images, files, audio) are refused."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


TextParts = Annotated[list[ResponseTextPart], Field(fail_fast=True)]


class InputMessage(EchoedPart):
    """A message, of a user or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | TextParts


class InputFunctionCall(EchoedPart):
    """A call that the model made in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputFunctionCallOutput(EchoedPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | TextParts


class InputReasoning(EchoedPart):
    """Reasoning of an earlier response. Its `content` is passed to the chat template, encrypted content is not."""

    type: Literal["reasoning"]
    content: Annotated[list[ResponseTextPart] | None, Field(fail_fast=True)] = None


class InputItemReference(EchoedPart):
    """An item of an earlier response, by its id. Only sessions of the agent service know earlier responses."""

    type: Literal["item_reference"]
    id: str


def _kind(item: dict[str, JsonValue] | EchoedPart) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputItemReference, Tag("item_reference")],
    Discriminator(_kind),
]
"""An item of the conversation. A message may leave out its type."""


_REFERENCE = "item_reference"
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _known_items(items: JsonValue) -> JsonValue:
    """Raise for an item of another kind, instead of a list of what each kind lacks."""
    for place, item in enumerate(items if isinstance(items, list) else []):
        kind = _kind(item) if isinstance(item, dict) else "message"
        if kind not in (*_KINDS, _REFERENCE):
            raise _other_kind(place, kind, "leave it out")
    return items


def _other_kind(place: int, kind: str, remedy: str) -> PydanticCustomError:
    got = {"param": "input", "place": place, "kinds": " or ".join(_KINDS), "kind": kind[:32], "remedy": remedy}
    return PydanticCustomError("unsupported", "{param}[{place}]: expected {kinds}, got {kind}; {remedy}", got)


class ResponseTool(OpenAIRequest):
    """A function that the model may call. OpenAI's hosted tools are refused."""

    neutral: ClassVar[dict[str, list[JsonValue]]] = {}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """No effect: arguments are the model's own. They are guided only together with a JSON format."""


class ResponseToolChoice(WireRequest):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class ReasoningOptions(EchoedPart):
    """Effort of the model's reasoning."""

    effort: str | None = Field(default=None, max_length=64)
    """Passed to the chat template as `reasoning_effort`."""


class TextFormat(OpenAIRequest):
    """The format of the text, as `response_format` of a chat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, JsonValue] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, JsonValue]:
        """The same for a chat."""
        fields: dict[str, JsonValue] = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": self.type, **({"json_schema": fields} if self.type == "json_schema" else {})}


class TextOptions(OpenAIRequest):
    """Options of the text."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"verbosity"})
    neutral: ClassVar[dict[str, list[JsonValue]]] = {}

    format: TextFormat = Field(default_factory=TextFormat)


_LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that returns logprobs."""


class ResponsesRequest(GenerationRequest):
    """The next response of a conversation."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "user",
        }
    )
    neutral: ClassVar[dict[str, list[JsonValue]]] = {
        "background": [False],
        "context_management": [[]],
        "conversation": [],
        "moderation": [],
        "prompt": [],
        "prompt_logprobs": [],
        "truncation": ["disabled"],
    }

    keeps_items: ClassVar[bool] = False
    """True if the route knows the items of its earlier responses."""

    model: str
    input: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)],
        BeforeValidator(_known_items),
    ]
    instructions: str | None = None
    """A system message before the input."""
    previous_response_id: str | None = None
    """The response that this one continues. Only sessions of the agent service know earlier responses."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list[ResponseTool]
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False keeps only the first call."""
    max_output_tokens: Int | None = Field(default=None, ge=1)
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] = Field(default_factory=list[str])
    """`message.output_text.logprobs` returns logprobs of texts, not of calls. Other values have no effect."""
    top_logprobs: Int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Most likely tokens to return at each position, the sampled one among them; with these logprobs."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def has_logprobs(self) -> bool:
        """Return whether to return the logprobs of the text."""
        return _LOGPROBS in self.include

    @model_validator(mode="after")
    def _supported(self) -> "ResponsesRequest":
        for place, item in enumerate([] if self.keeps_items else self.input):
            if isinstance(item, InputItemReference):
                remedy = "send the item itself (store: false), or previous_response_id in a session"
                raise _other_kind(place, item.type, remedy)
        if self.top_logprobs and not self.has_logprobs:
            message = "{param}: expected include=['{name}'] with it, got none; add it, or leave {param} out"
            raise PydanticCustomError("unsupported", message, {"param": "top_logprobs", "name": _LOGPROBS})
        choice, names = self.tool_choice, [tool.name for tool in self.tools]
        is_named = isinstance(choice, ResponseToolChoice)
        check_tool_choice(names, choice.name if is_named else choice, is_named=is_named)
        return self


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
