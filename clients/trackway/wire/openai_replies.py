"""What OpenAI's completions and chat completions answer, with vLLM's names for what OpenAI lacks."""

from typing import Literal

from pydantic import JsonValue

from trackway.wire.base import WireReply
from trackway.wire.chat import ToolCall
from trackway.wire.rollout import Usage
from trackway.wire.trajectory import WeightSpan


class OpenAIReply(WireReply):
    """A reply in which only the fields that were set are sent, null ones included."""

    def sent(self) -> str:
        """The JSON of the reply."""
        return self.model_dump_json(exclude_unset=True)


ChoiceEnd = Literal["stop", "length", "tool_calls"]


class Choice(OpenAIReply):
    """What both kinds of choice share."""

    index: int
    finish_reason: ChoiceEnd | None
    """None in every chunk of a stream but the last."""
    token_ids: list[int] | None = None
    """Of the output, with `return_token_ids`; the token that ended it is one of them."""
    weight_versions: list[WeightSpan] | None = None
    """Which weights made `token_ids`, with `return_token_ids`; counted over the choice's whole output."""


class CompletionLogprobs(OpenAIReply):
    """Token by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where in the choice's text the token begins."""


class CompletionChoice(Choice):
    """One continuation, or in a stream what is new of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`; in a stream in the choice's first chunk."""


class Completion(OpenAIReply):
    """The answer, and every chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatLogprob(OpenAIReply):
    """One token."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Of its text in UTF-8; None for a token that is a part of a character."""
    top_logprobs: list[JsonValue]
    """Always empty: only the sampled token's logprob is known."""


class ChatLogprobs(OpenAIReply):
    """Token by token."""

    content: list[ChatLogprob]


class ChatReplyMessage(OpenAIReply):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str | None
    """None when it consists of tool calls only."""
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
    """With `return_token_ids`; in a stream in its first chunk."""


class ChatCompletion(_ChatAnswer):
    """The whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ToolCallDelta(ToolCall):
    """A call in a stream, always whole."""

    index: int


class ChatDelta(OpenAIReply):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    """What is new of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(_ChatAnswer):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
