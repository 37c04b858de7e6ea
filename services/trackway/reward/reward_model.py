"""verl's reward model: a classifier that scores by itself, or a model that a scoring function asks.

As in verl (verl/experimental/reward_loop/reward_loop.py), a model without a scoring function is a classifier, and the
score of a conversation is its logit.
"""

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, JsonValue, SecretStr

from trackway.clients import CallPolicy, Deadline, ServiceClient
from trackway.serving import ServiceSettings
from trackway.serving.user_code import in_thread
from trackway.wire.base import WireRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ClassifyReply
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARD_MODEL = "reward_model"
"""Application and route prefix of the service that serves the reward model."""


class RewardModelSettings(BaseModel):
    """The model that `custom_reward_function` asks. Without one, a classifier that is the scorer `reward_model`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: str
    """The model's name in requests, and folder or Hub id of its tokenizer, which is loaded when a function that takes
    it is first called."""
    base_url: HttpUrl | None = None
    """URL of the server without `/v1`; http for a function. Null is the service `reward_model` below this service's
    `base_url`. A classifier's has vLLM's `/classify`."""
    timeout_s: float = Field(default=50.0, gt=0)
    """Limit of one score of a classifier in seconds, retries included. Keep it below `score_timeout_s`."""
    attempts: int = Field(default=5, ge=1)
    """Attempts at a classifier when the server fails or cannot be reached; until the limit when it is full (429)."""
    max_in_flight: int = Field(default=64, ge=1)
    """Concurrent requests of one replica to a classifier. Others wait until their limit."""


class RewardModelAccess:
    """The arguments that verl adds to the call of a scoring function."""

    def __init__(self, settings: RewardModelSettings, services_url: str) -> None:
        self.url = str(settings.base_url or f"{services_url.rstrip('/')}/{REWARD_MODEL}").rstrip("/")
        """URL of the server, without `/v1`."""
        self.router_address = self.url.partition("://")[2]
        """Host, port and path: verl's functions ask `http://{reward_router_address}/v1/chat/completions`, or the
        `/classify` of a classifier."""
        self._path = settings.path
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._loading = asyncio.Lock()

    async def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, loaded once. ImportError without transformers; OSError without its files."""
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await in_thread(self._load)
        return self._tokenizer

    def _load(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer  # a reward service that needs no tokenizer has no transformers

        return AutoTokenizer.from_pretrained(self._path)


class _Conversation(WireRequest):
    """A request to `/classify` without nulls, of which a vLLM takes some for invalid."""

    model: str
    messages: list[dict[str, JsonValue]] = Field(fail_fast=True)
    use_activation: bool = False
    """False asks for the logit."""


class RewardModelScorer:
    """Scores a conversation by a classifier's logit. A failure of the server is an error, so that no score is made up:
    the trajectory fails and does not enter its group's mean."""

    def __init__(self, model: RewardModelSettings, service: ServiceSettings) -> None:
        self.info = ScorerInfo(
            name=REWARD_MODEL,
            data_sources=[ANY_DATA_SOURCE],
            methods=["default"],
            description=f"The logit that the classifier {model.path} gives the conversation.",
        )
        self._model = model
        policy = CallPolicy(
            read_s=model.timeout_s, total_s=model.timeout_s, attempts=model.attempts, max_in_flight=model.max_in_flight
        )
        own = model.base_url is None  # tokens and replicas' own ports are those of our services alone
        self._client = ServiceClient(
            RewardModelAccess(model, service.base_url).url,
            policy=policy,
            token=service.token if own else SecretStr(""),
            direct=own and service.direct,
        )

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """The logit of the request's messages. TrackwayError when there are none, when the model's chat template
        rejects them or they exceed its context length, and when the server fails."""
        if not request.messages:
            message = "messages: expected the conversation to score, got none; send its messages with the solution"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{REWARD_MODEL}: {message}")
        asked = _Conversation(
            model=self._model.path,
            messages=[message.model_dump(mode="json", exclude_none=True) for message in request.messages],
        )
        try:
            deadline = Deadline.after(self._model.timeout_s)
            reply = await self._client.call("POST", "/classify", reply=ClassifyReply, body=asked, deadline=deadline)
        except TrackwayError as error:
            raise _explained(error) from error
        if len(reply.data) != 1 or len(reply.data[0].probs) != 1:
            message = f"expected one score from {self._client.base_url}/classify, got {str(reply.data)[:200]}"
            raise TrackwayError(ErrorCode.INTERNAL, f"{REWARD_MODEL}: {message}; serve a model with one label")
        return Reward(score=reply.data[0].probs[0])


def _explained(error: TrackwayError) -> TrackwayError:
    """The error with the scorer's name, and what a model without `/classify` needs."""
    message = f"{REWARD_MODEL}: {error.message}"
    if error.code is ErrorCode.NOT_FOUND:
        remedy = "without custom_reward_function the reward model must be a classifier (*ForSequenceClassification)"
        return TrackwayError(ErrorCode.INTERNAL, f"{message}; {remedy}")
    return TrackwayError(error.code, message)
