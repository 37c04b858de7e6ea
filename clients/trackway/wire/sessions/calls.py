"""Calls of a session's model: requests of OpenAI's and Anthropic's routes from agents that are not written for us.

Sampling is the run's, so an agent's own is noted and left out. A field that no route knows is noted and ignored. A
field that would change the answer and is not supported is refused, as on the rollout service's routes.
"""

from collections.abc import Mapping
from functools import cache
from typing import ClassVar, NamedTuple, Self

from pydantic import JsonValue, ModelWrapValidatorHandler, PrivateAttr, model_validator

from trackway.wire.anthropic.requests import CountTokensRequest, MessagesRequest
from trackway.wire.openai.requests import ChatRequest, CompletionRequest, OpenAIRequest
from trackway.wire.openai.response_requests import ResponsesRequest

SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "top_a",
        "min_p",
        "typical_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "best_of",
        "use_beam_search",
    }
)
"""Fields that choose among the model's tokens and change nothing else of the answer."""

_IGNORED = frozenset({"truncation", "context_management", "prediction"})
"""Fields that other routes refuse, and without which a session answers the same or refuses the call by its bound."""


class LeftOut(NamedTuple):
    """Field of a call that has no effect."""

    sampling: Mapping[str, JsonValue]
    """The sampling, which is the run's."""
    ignored: frozenset[str]
    """The names of other fields."""


_NOTHING = LeftOut({}, frozenset())


class SessionCall(OpenAIRequest):
    """Fields that the calls of all formats share."""

    _left_out: LeftOut = PrivateAttr(default_factory=lambda: _NOTHING)

    @property
    def left_out(self) -> LeftOut:
        """Fields of the call that had no effect."""
        return self._left_out

    @model_validator(mode="wrap")
    @classmethod
    def _without_sampling(cls, fields: JsonValue, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return handler(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = given.keys() - _known(cls)
        others = {name: given.pop(name) for name in unknown}
        call = handler(given)
        ignored = frozenset(unknown - SAMPLING) | _strict(given.get("tools"))
        if others or ignored:
            call._left_out = LeftOut({name: others[name] for name in unknown & SAMPLING}, ignored)
        return call


def _strict(tools: JsonValue) -> frozenset[str]:
    """The field `strict` of tools, if one sets it: without effect, since guided calls would not be trained."""
    for tool in tools if isinstance(tools, list) else []:
        if isinstance(tool, dict):
            function = tool.get("function", tool)
            if isinstance(function, dict) and function.get("strict"):
                return frozenset({"tools.strict"})
    return frozenset()


@cache
def _known(kind: type[SessionCall]) -> frozenset[str]:
    return frozenset(kind.model_fields.keys() | kind.neutral.keys()) - SAMPLING - _IGNORED


class SessionChat(SessionCall, ChatRequest):
    """The next message of a conversation."""


class SessionCompletion(SessionCall, CompletionRequest):
    """Continue one or several prompts, each as text or token ids."""


class SessionResponse(SessionCall, ResponsesRequest):
    """The next response of a conversation."""

    keeps_items: ClassVar[bool] = True


class SessionMessages(SessionCall, MessagesRequest):
    """The next message of a conversation, for Anthropic's clients."""


class SessionTokenCount(SessionCall, CountTokensRequest):
    """A conversation whose tokens are counted."""
