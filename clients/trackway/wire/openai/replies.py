"""Responses of OpenAI's completions and chat completions, with vLLM's names for additional fields."""

from typing import Literal

from trackway.wire.base import WireReply
from trackway.wire.chat import ToolCall
from trackway.wire.rollout import PromptLogprobs, Usage
from trackway.wire.trajectory import WeightSpan


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
