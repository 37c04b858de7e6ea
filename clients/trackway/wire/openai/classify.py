"""vLLM's `/classify`: the scores of texts, token ids or one conversation by a classifier."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from trackway.wire.base import WireReply
from trackway.wire.chat import MAX_MESSAGES
from trackway.wire.openai.requests import ChatMessage, OpenAIRequest, TokenPrompt
from trackway.wire.rollout import Usage

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
        if self.input is None or isinstance(self.input, str):
            return [] if self.input is None else [self.input]
        ids = [item for item in self.input if isinstance(item, int)]
        return [ids] if ids else [item for item in self.input if not isinstance(item, int)]

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
