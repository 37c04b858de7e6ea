"""OpenAI's completions and chat completions, and vLLM's `/classify`, with vLLM's names for additional fields.

A request is refused if it has an unsupported field that would change its result. Null means not set.
"""

from functools import cache, cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from trackway.wire.base import NON_FINITE, Float, Int, TokenId, WireReply, WireRequest
from trackway.wire.chat import MAX_MESSAGES, MAX_TOOLS, ToolCall
from trackway.wire.errors import shortened
from trackway.wire.rollout import MAX_TOP_LOGPROBS, PromptLogprobs, StructuredOutputs, Usage
from trackway.wire.trajectory import WeightSpan

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
    }
)
"""Fields without influence on the answer, accepted with any value."""

NEUTRAL: dict[str, list[JsonValue]] = {
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "repetition_penalty": [1],
    "logit_bias": [{}],
    "min_p": [0],
    "min_tokens": [0],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "top_logprobs": [0],
    "prompt_logprobs": [],
    "response_format": [{"type": "text"}],
    "structured_outputs": [],
    "guided_json": [],
    "guided_regex": [],
    "guided_choice": [],
    "guided_grammar": [],
    "modalities": [["text"]],
    "functions": [[]],
    "function_call": ["none"],
    "audio": [],
    "refusal": [],
    "annotations": [[]],
    "prediction": [],
    "web_search_options": [],
    "use_beam_search": [False],
    "chat_template": [],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "truncate_prompt_tokens": [],
    "spaces_between_special_tokens": [True],
}
"""Unsupported fields with their neutral values. Any other value is refused."""

REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("response_format", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        ),
        "give a JSON schema as response_format of /v1/chat/completions",
    ),
    "output_format": "give it as output_config.format",
    "top_logprobs": "unsupported here; ask for logprobs",
    "prompt_logprobs": "unsupported here; ask /v1/chat/completions of the rollout service",
}
"""Why some of them are refused, and the remedy."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class OpenAIRequest(WireRequest):
    """Drops null and neutral fields before validation."""

    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT
    neutral: ClassVar[dict[str, list[JsonValue]]] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: JsonValue) -> JsonValue:
        if not isinstance(fields, dict):
            return fields
        dropped = _dropped(cls)
        if dropped.isdisjoint(fields) and None not in fields.values():
            return fields
        for name in fields.keys() & cls.neutral.keys():
            if fields[name] is not None and fields[name] not in cls.neutral[name]:
                neutral = " or ".join(["nothing", *map(repr, cls.neutral[name])])
                why = REASONS.get(name, "unsupported")
                got = {"param": name, "neutral": neutral, "value": shortened(repr(fields[name]), 64), "why": why}
                raise PydanticCustomError("unsupported", "{param}: expected {neutral}, got {value}: {why}", got)
        return {name: value for name, value in fields.items() if name not in dropped and value is not None}


class EchoedPart(WireRequest):
    """A part of a conversation. Clients return parts of answers with fields of any age, which have no effect."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan=NON_FINITE)


@cache
def _dropped(kind: type[OpenAIRequest]) -> frozenset[str]:
    return kind.without_effect | kind.neutral.keys()


class StreamOptions(OpenAIRequest):
    """Options of a stream."""

    include_usage: bool = False
    """Send the token counts in a last chunk without choices."""
    include_obfuscation: bool = False
    """No effect: padding is never sent."""


class GenerationRequest(OpenAIRequest):
    """Fields of each request for generated text, with the same meaning in all three APIs."""

    temperature: Float = Field(default=1.0, ge=0.0)
    top_p: Float = Field(default=1.0, ge=0.0, le=1.0)
    """0 decodes greedily, as temperature 0."""
    top_k: Int = Field(default=-1, ge=-1)
    seed: Int | None = None
    """Choice i of a prompt samples with `seed + i`."""
    stream: bool = False
    return_token_ids: bool = False
    """Also return the token ids of prompt and output, and the weight versions that generated them."""
    min_weight_version: Int = Field(default=0, ge=0)
    """Oldest weight version that may answer. A replica with an older one loads it first, or answers 409
    `weights_behind`."""


class SampledRequest(GenerationRequest):
    """Fields shared by both kinds of request."""

    model: str
    n: Int = Field(default=1, ge=1, le=128)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=256, fail_fast=True),
        BeforeValidator(_as_list),
    ] = Field(default_factory=list[str])
    stop_token_ids: list[TokenId] = Field(default_factory=list[TokenId], max_length=1024, fail_fast=True)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    """Name tokens of logprobs `token_id:17`, which is unambiguous, unlike their text."""
    prompt_logprobs: Int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Score each prompt, and return so many of the most likely tokens at each of its positions."""

    @property
    def most_likely(self) -> int:
        """Return how many of the most likely tokens to return at each position."""
        return 0

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The grammar of the answer. Raises ValidationError for a schema beyond the bounds."""
        return None

    @property
    def with_offsets(self) -> bool:
        """Return whether to find where each token begins in the text."""
        return False

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "SampledRequest":
        if self.stream_options is not None and not self.stream:
            got = {"param": "stream_options"}
            raise PydanticCustomError("unsupported", "{param}: expected stream=true with it; leave it out", got)
        return self


MAX_CHOICES = 4096
"""Most choices of one request: `n` for each prompt."""

TokenPrompt = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def _each(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """Return each of several prompts. A list of ids is one prompt."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]


class CompletionRequest(SampledRequest):
    """Continue one or several prompts, each as text or token ids."""

    neutral: ClassVar[dict[str, list[JsonValue]]] = {
        name: values for name, values in NEUTRAL.items() if name != "prompt_logprobs"
    }

    prompt: (
        str
        | TokenPrompt
        | Annotated[list[str | TokenPrompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    max_tokens: Int = Field(default=16, ge=1)
    logprobs: Int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """0 returns the logprob of each sampled token. More also return the most likely tokens."""
    add_special_tokens: bool = True
    """True if the tokenizer adds its special tokens (a BOS) to a text prompt."""

    @property
    def most_likely(self) -> int:
        """Return how many of the most likely tokens to return at each position."""
        return self.logprobs or 0

    @property
    def with_offsets(self) -> bool:
        """Return whether to find where each token begins in the text."""
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        return _each(self.prompt)

    @model_validator(mode="after")
    def _choices(self) -> "CompletionRequest":
        count = len(self.prompts) * self.n
        if count > MAX_CHOICES:
            got = {"param": "n", "bound": MAX_CHOICES, "count": count}
            raise PydanticCustomError("choices", "{param}: expected at most {bound} answers in all, got {count}", got)
        return self


class TextPart(WireRequest):
    """A text part of a message. Other kinds are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(OpenAIRequest):
    """One message of the conversation so far. Fields that clients add to our messages are dropped."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan=NON_FINITE)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list[ToolCall], fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Passed to the chat template unchanged."""

    @property
    def text(self) -> str:
        """Its content, the parts joined by newlines."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatTool(WireRequest):
    """A function that the model may call. The chat template receives its keys in the client's order."""

    type: Literal["function"]
    function: dict[str, JsonValue]

    @model_validator(mode="after")
    def _named(self) -> "ChatTool":
        if not isinstance(self.function.get("name"), str):
            raise PydanticCustomError("tool", "expected a function with a name")
        return self

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.function["name"])


class FunctionName(WireRequest):
    """A function by its name."""

    name: str


class NamedTool(WireRequest):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(WireRequest):
    """A JSON schema of the answer."""

    name: str = Field(default="", max_length=64)
    """No effect."""
    description: str | None = None
    """No effect."""
    json_schema: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None
    """No effect: the answer always has the schema."""


class ResponseFormat(OpenAIRequest):
    """The format of the answer's text, which guides the sampling unless it is `text`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """With this type."""

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("format", "expected json_schema with type json_schema, and only with it")
        return self

    @cached_property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The grammar. Raises ValidationError for a schema beyond the bounds of what may guide."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=self.json_schema.json_schema)


def check_tool_choice(names: list[str], wanted: str, *, is_named: bool) -> None:
    """Refuse a request that must call a tool which it does not offer, or any without offering one."""
    if (is_named and wanted not in names) or (wanted in ("required", "any") and not names):
        got = {"param": "tool_choice", "names": str(names), "wanted": wanted}
        raise PydanticCustomError("tool", "{param}: expected one of the tools {names}, got {wanted}", got)


class ChatRequest(SampledRequest):
    """The next message of a conversation."""

    neutral: ClassVar[dict[str, list[JsonValue]]] = {
        name: values
        for name, values in NEUTRAL.items()
        if name not in ("response_format", "top_logprobs", "prompt_logprobs")
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: Int | None = Field(default=None, ge=1)
    max_completion_tokens: Int | None = Field(default=None, ge=1)
    """Takes precedence over `max_tokens`. Without both, the rest of the model's context length."""
    logprobs: bool = False
    top_logprobs: Int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Most likely tokens to return at each position, the sampled one among them; with `logprobs`."""
    response_format: ResponseFormat | None = None
    """`json_object` and `json_schema` guide the sampling, where the engine can."""
    tools: list[ChatTool] = Field(default_factory=list[ChatTool], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    """False keeps only the first call."""
    reasoning_effort: str | None = Field(default=None, max_length=64)
    """Passed to the chat template as a variable of this name, which most templates ignore."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def most_likely(self) -> int:
        """Return how many of the most likely tokens to return at each position."""
        return self.top_logprobs

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The grammar of the answer's text, or None for a forced call, which has no text."""
        return self.response_format.structured_outputs if self.response_format and self.is_guided else None

    @property
    def is_guided(self) -> bool:
        """Return whether the answer's text has a format."""
        has_text = not self.offers_tools or self.tool_choice == "auto"
        return has_text and self.response_format is not None and self.response_format.type != "text"

    @property
    def offers_tools(self) -> bool:
        """Return whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def with_offsets(self) -> bool:
        """Return whether to find where each token begins in the text: responses have logprobs of text, not of calls."""
        return self.logprobs and self.offers_tools

    @model_validator(mode="after")
    def _top_logprobs_with_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            got = {"param": "top_logprobs", "value": self.top_logprobs}
            message = "{param}: expected logprobs=true with it, got {value} without; set it, or leave {param} out"
            raise PydanticCustomError("unsupported", message, got)
        return self

    @model_validator(mode="after")
    def _choice_among_the_tools(self) -> "ChatRequest":
        choice, names = self.tool_choice, [tool.name for tool in self.tools]
        is_named = isinstance(choice, NamedTool)
        check_tool_choice(names, choice.function.name if is_named else choice, is_named=is_named)
        return self


class OpenAIReply(WireReply):
    """A response that sends only the fields that were set, null values included."""

    def sent(self) -> str:
        """The response as JSON."""
        return self.model_dump_json(exclude_unset=True)


ChoiceEnd = Literal["stop", "length", "tool_calls"]


class Choice(OpenAIReply):
    """Fields shared by both kinds of choice."""

    index: int
    finish_reason: ChoiceEnd | None
    """None in every chunk of a stream except the last."""
    token_ids: list[int] | None = None
    """Token ids of the output, the stop token included; with `return_token_ids`."""
    weight_versions: list[WeightSpan] | None = None
    """Weight versions that generated `token_ids`, as spans over the choice's whole output; with `return_token_ids`."""


class CompletionLogprobs(OpenAIReply):
    """Token by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Offset in the choice's text at which the token begins."""


class CompletionChoice(Choice):
    """One continuation, or its next part in a stream."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`; in a stream, in the choice's first chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """With `prompt_logprobs`; in the first choice of each prompt; in a stream, in one of its chunks."""


class Completion(OpenAIReply):
    """A completion, and every chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(OpenAIReply):
    """One token."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token's text as UTF-8 bytes, or None for a token that is part of a character."""


class ChatLogprob(TopLogprob):
    """A sampled token."""

    top_logprobs: list[TopLogprob]
    """With `top_logprobs`: the most likely tokens, the sampled one among them, highest first."""


class ChatLogprobs(OpenAIReply):
    """Token by token."""

    content: list[ChatLogprob]


class ChatReplyMessage(OpenAIReply):
    """The message written by the model."""

    role: Literal["assistant"]
    content: str | None
    """None if it consists of tool calls only."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """One answer."""

    message: ChatReplyMessage
    logprobs: ChatLogprobs | None


class _ChatAnswer(OpenAIReply):
    id: str
    created: int
    model: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`; in a stream, in its first chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """With `prompt_logprobs`; in a stream, in one of its chunks."""


class ChatCompletion(_ChatAnswer):
    """The complete answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ToolCallDelta(ToolCall):
    """A tool call in a stream, always complete."""

    index: int


class ChatDelta(OpenAIReply):
    """The next part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    """The next part of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(_ChatAnswer):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


MAX_INPUTS = 1024
"""Most inputs of one request."""


class ClassifyRequest(OpenAIRequest):
    """Texts or token ids as `input`, or the `messages` of one conversation."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"user", "request_id", "cache_salt"})
    neutral: ClassVar[dict[str, list[JsonValue]]] = {
        "add_generation_prompt": [False],
        "continue_final_message": [False],
        "chat_template": [],
        "truncate_prompt_tokens": [],
        "truncation_side": [],
        "padding": ["do_not_pad"],
        "priority": [0],
        "mm_processor_kwargs": [{}],
        "media_io_kwargs": [{}],
    }

    model: str | None = None
    input: (
        str
        | TokenPrompt
        | Annotated[list[str | TokenPrompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | None
    ) = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """Rendered by the model's chat template, without a generation prompt."""
    add_special_tokens: bool | None = None
    """True if the tokenizer adds its special tokens. null adds them to texts, and none to what the template renders."""
    use_activation: bool | None = None
    """False returns the logit itself. Otherwise it passes the sigmoid, unless the model is one of regression."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each input, as text or token ids; none for a conversation."""
        return [] if self.input is None else _each(self.input)

    @model_validator(mode="after")
    def _one_of_them(self) -> "ClassifyRequest":
        if (self.input is None) == (self.messages is None):
            got = {"param": "input"}
            raise PydanticCustomError("input", "{param}: expected either input or messages; give one of them", got)
        return self


class Classification(WireReply):
    """The scores of one input."""

    index: int
    label: str | None
    """The model's name of the class with the highest score."""
    probs: list[float]
    """One for each class."""
    num_classes: int


class ClassifyReply(WireReply):
    """The scores of each input, in order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage
