"""Calls of a session's model: requests of OpenAI's and Anthropic's routes from agents that are not written for us.

Sampling is the run's, so an agent's own is noted and left out. A field that no route knows is noted and ignored. A
field that would change the answer and is not supported is refused, as on the rollout service's routes.
"""

from collections.abc import Mapping
from functools import cache
from typing import Self

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


class SessionCall(OpenAIRequest):
    """What the calls of all formats share."""

    _sampling: dict[str, JsonValue] = PrivateAttr(default_factory=dict[str, JsonValue])
    _ignored: frozenset[str] = PrivateAttr(default_factory=frozenset[str])

    @property
    def sampling(self) -> Mapping[str, JsonValue]:
        """The sampling that the agent asked for, which has no effect."""
        return self._sampling

    @property
    def ignored(self) -> frozenset[str]:
        """The names of other fields without effect."""
        return self._ignored

    @model_validator(mode="wrap")
    @classmethod
    def _without_sampling(cls, fields: JsonValue, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return handler(fields)
        given = {name: value for name, value in fields.items() if value is not None}
        known = _known(cls)
        call = handler({name: value for name, value in given.items() if name in known})
        call._sampling = {name: value for name, value in given.items() if name in SAMPLING}
        call._ignored = frozenset(given.keys() - known - SAMPLING) | _strict(given.get("tools"))
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


class SessionMessages(SessionCall, MessagesRequest):
    """The next message of a conversation, for Anthropic's clients."""


class SessionTokenCount(SessionCall, CountTokensRequest):
    """A conversation whose tokens are counted."""
