"""A model as a judge: a scorer that asks any server with OpenAI's chat completions, such as a rollout service."""

import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretStr, field_validator, model_validator

from trackway.clients import CallPolicy, Deadline, ServiceClient
from trackway.wire.base import Float, Int, WireReply, WireRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ANY_DATA_SOURCE, ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward

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
