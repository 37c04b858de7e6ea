"""Models that score: a judge behind any server with OpenAI's chat completions, and verl's reward model.

As in verl (verl/experimental/reward_loop/reward_loop.py), a reward model without a scoring function is a classifier,
and the score of a conversation is its logit. A scoring function may ask it instead.
"""

import asyncio
import re
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, JsonValue, SecretStr, field_validator, model_validator

from trackway.clients import CallPolicy, Deadline, ServiceClient
from trackway.serving import ServiceSettings
from trackway.serving.user_code import in_thread
from trackway.wire.base import Float, Int, WireReply, WireRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ClassifyReply
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BLANK = re.compile(r"\{(data_source|solution_str|ground_truth|extra_info\.[\w-]+)\}")
_SHOWN_CHARS = 120
_PROMPT = """Grade the answer to a task. The reference answer is: {ground_truth}

The answer to grade is everything between the two lines of dashes.
----------
{solution_str}
----------

Think briefly. Then end with one line `Score: N`, where N is a number from 0 (wrong) to 10 (fully correct)."""


class JudgeSettings(BaseModel):
    """A judge: a model that is asked for the score of a solution."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str = "judge"
    """Name of the scorer."""
    data_sources: list[str] = Field(default_factory=lambda: [ANY_DATA_SOURCE])
    """Data sources that it scores. `*` is every one that has no other scorer."""
    base_url: HttpUrl
    """URL of the API to its version: `https://host/v1`, or `http://127.0.0.1:8000/rollout/v1` for a rollout service."""
    model: str
    """Name of the model, as the server knows it."""
    token: SecretStr = SecretStr("")
    """Bearer token for that server. TRACKWAY_TOKEN is not sent there."""
    prompt: str = _PROMPT
    """The user message. `{solution_str}`, `{ground_truth}`, `{data_source}` and `{extra_info.KEY}` are filled in."""
    score_pattern: str = r"(?i)score[^\w.-]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number in the answer. The last match counts."""
    lowest: float = 0.0
    """The number that becomes the score 0."""
    highest: float = 10.0
    """The number that becomes the score 1. Numbers outside the range are an error."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature of the judge."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest answer in tokens."""
    timeout_s: float = Field(default=50.0, gt=0)
    """Limit of one score in seconds, retries included. Keep it below `score_timeout_s`."""
    attempts: int = Field(default=3, ge=1)
    """Attempts when the server fails or cannot be reached; until the limit when it is full (429)."""
    max_in_flight: int = Field(default=16, ge=1)
    """Concurrent requests of one replica. Others wait until their limit."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_solution(cls, prompt: str) -> str:
        if "{solution_str}" not in prompt:
            raise ValueError("expected {solution_str} in the prompt, got none; add it where the solution belongs")
        return prompt

    @field_validator("score_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"expected a regular expression, got {pattern!r}: {error}") from error
        if groups < 1:
            raise ValueError(f"expected a group around the number, got {pattern!r}; put the number in parentheses")
        return pattern

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"expected lowest below highest, got {self.lowest:g} and {self.highest:g}")
        return self


class JudgeScorer:
    """Asks the judge once per solution. A failure of the server or an answer without a number is an error, so that no
    score is made up: the trajectory fails and does not enter its group's mean."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.info = ScorerInfo(
            name=settings.name,
            data_sources=settings.data_sources,
            methods=["default"],
            description=f"The score that {settings.model} gives, from {settings.lowest:g} to {settings.highest:g}.",
        )
        self._settings = settings
        policy = CallPolicy(
            read_s=settings.timeout_s,
            total_s=settings.timeout_s,
            attempts=settings.attempts,
            max_in_flight=settings.max_in_flight,
        )
        self._client = ServiceClient(str(settings.base_url), policy=policy, token=settings.token)

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        """The judge's number, scaled to 0 to 1. TrackwayError when the server fails or the answer has no number."""
        settings = self._settings
        question = _ChatRequest(
            model=settings.model,
            messages=[_Message(role="user", content=self._prompt(request))],
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
        )
        try:
            answer = await self._client.call(
                "POST",
                "/chat/completions",
                reply=_ChatAnswer,
                body=question,
                deadline=Deadline.after(settings.timeout_s),
            )
        except TrackwayError as error:
            code = error.code if error.retryable or error.code is ErrorCode.DEADLINE_EXCEEDED else ErrorCode.INTERNAL
            raise TrackwayError(code, f"judge {settings.name!r}: {error.message}") from error
        number = self._number(answer.choices[0].message.content or "" if answer.choices else "")
        return Reward(score=(number - settings.lowest) / (settings.highest - settings.lowest))

    def _prompt(self, request: ScoreRequest) -> str:
        """The prompt with its blanks filled in at once: what is filled in is not searched for blanks."""

        def value(blank: re.Match[str]) -> str:
            name = blank[1]
            if not name.startswith("extra_info."):
                return str(getattr(request, name))
            key = name.removeprefix("extra_info.")
            if key not in request.extra_info:
                raise TrackwayError(
                    ErrorCode.INVALID_REQUEST,
                    f"judge {self._settings.name!r}: expected {key!r} in the row's extra_info for its prompt, got "
                    f"{', '.join(sorted(request.extra_info)) or 'nothing'}; correct the prompt or the rows",
                )
            return str(request.extra_info[key])

        return _BLANK.sub(value, self._settings.prompt)

    def _number(self, text: str) -> float:
        settings = self._settings
        found = [*re.finditer(settings.score_pattern, text)]
        try:
            number = float(found[-1][1])
        except (IndexError, TypeError, ValueError):
            number = None
        if number is None or not settings.lowest <= number <= settings.highest:
            raise TrackwayError(
                ErrorCode.INTERNAL,
                f"judge {settings.name!r}: expected a number from {settings.lowest:g} to {settings.highest:g} by "
                f"score_pattern, got {text[-_SHOWN_CHARS:]!r}; correct the prompt, the pattern or max_tokens",
            )
        return number


class _Message(WireRequest):
    role: str
    content: str


class _ChatRequest(WireRequest):
    model: str
    messages: list[_Message] = Field(fail_fast=True)
    temperature: Float
    max_tokens: Int


class _AnswerMessage(WireReply):
    content: str | None = None


class _Choice(WireReply):
    message: _AnswerMessage


class _ChatAnswer(WireReply):
    choices: list[_Choice]


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
        own = model.base_url is None  # only our own services take tokens and have direct ports
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
