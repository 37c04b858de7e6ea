"""A trajectory in progress: ids, mask, logprobs and weight spans, which are append-only, and what it waits for.

`response_ids`, `response_mask` and `response_logprobs` have one entry per token after the prompt. Generated tokens
have mask 1 and their logprob. Observations and template tokens have mask 0 and logprob 0.0.

The waits of a rollout are in the context of the task that runs it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import JsonValue

from trackway.clients import Deadline
from trackway.system.waits import BegunWait, Waits, noted_in
from trackway.wire.agent import GroupRequest, Limits, Sample
from trackway.wire.chat import Message, ToolSchema
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateChoice, SamplingParams, TopLogprobs
from trackway.wire.service import Wait
from trackway.wire.trajectory import (
    Reward,
    StopReason,
    Tags,
    Timings,
    TokenUsage,
    Trajectory,
    Turn,
    WeightSpan,
    require_trainable,
    trajectory_id,
)


class RolloutWaits:
    """The waits of one rollout."""

    def __init__(self, tags: Tags) -> None:
        self._name = f"rollout {tags.step}/{tags.sample_index}/{tags.rollout_n}"
        self._waits = Waits()

    def __call__(
        self, waits_for: str, deadline: Deadline | None = None, progress: Callable[[], str] = lambda: ""
    ) -> AbstractContextManager[object]:
        """A wait of the rollout, for the duration of the block."""
        timeout_s = None if deadline is None else deadline.remaining
        return _NotedWait(self._waits(self._name, waits_for, timeout_s, progress))

    def current(self) -> list[Wait]:
        """Its present wait. Its agent loop, if that waits for no service."""
        outer, *inner = self._waits.current() or [None]
        return [wait for wait in inner or [outer] if wait is not None]


class _NotedWait(AbstractContextManager[None]):
    """A wait in which service calls note how they fare."""

    def __init__(self, wait: BegunWait) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        self._noted = noted_in([self._wait.__enter__()])
        self._noted.__enter__()

    def __exit__(self, *_: object) -> None:
        self._noted.__exit__(None, None, None)
        self._wait.__exit__(None, None, None)


current_rollout: ContextVar[RolloutWaits | None] = ContextVar("current_rollout", default=None)


def waits_for(what: str, deadline: Deadline | None = None) -> AbstractContextManager[object]:
    """A wait of the rollout that the current task belongs to, if there is one, for the duration of the block."""
    rollout = current_rollout.get()
    return nullcontext() if rollout is None else rollout(what, deadline)


_SHORT_PROMPT_CHARS = 16_384


@dataclass
class Episode:
    """The trajectory in progress. `trajectory()` returns its wire form."""

    request: GroupRequest
    tags: Tags
    agent_name: str
    deadline: Deadline
    tools: Sequence[ToolSchema] = ()
    """The offered tools."""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """The most likely tokens at each generated position, if the sampling parameters ask for them."""
    weight_versions: list[WeightSpan] = field(default_factory=list)
    usage: TokenUsage | None = None
    """Token counts of a model that returns no token ids."""
    turns: list[Turn] = field(default_factory=list)
    user_turns: int = 0
    """Turns of observations so far."""
    shown: int = 0
    """Tokens of prompt and response sent by generation calls so far."""
    tool_rewards: list[float] = field(default_factory=list)
    reward: Reward | None = None
    """A score that the loop sets itself is kept. Otherwise the reward service is asked."""
    stop_reason: StopReason = StopReason.ERROR
    error: ErrorBody | None = None
    timings: Timings = field(default_factory=Timings)

    @classmethod
    def begin(cls, request: GroupRequest, rollout_n: int, agent_name: str) -> Self:
        """Return a new episode for one rollout of the request."""
        return cls(request, request.tags(rollout_n), agent_name, Deadline.after(request.limits.timeout_s))

    @property
    def id(self) -> str:
        """Deterministic id. Also the affinity key of every call."""
        return trajectory_id(self.request.run, self.tags)

    @property
    def sample(self) -> Sample:
        """The dataset row."""
        return self.request.sample

    @property
    def sampling_params(self) -> SamplingParams:
        """Return how the model's tokens are sampled."""
        return self.request.sampling_params

    @property
    def turn(self) -> int:
        """Number of the next turn, which seeds and request ids depend on."""
        return len(self.turns)

    @property
    def limits(self) -> Limits:
        """The limits of this trajectory."""
        return self.request.limits

    @property
    def room(self) -> int:
        """Response tokens left."""
        used = self.usage.response_tokens if self.usage else len(self.response_ids)
        return self.limits.max_response_length - used

    @property
    def parameters(self) -> dict[str, JsonValue]:
        """The JSON schema of each offered tool's parameters, by the tool's name."""
        return {schema.function.name: schema.function.parameters for schema in self.tools}

    @property
    def context(self) -> list[int]:
        """Prompt and response so far: the prompt of the next generation."""
        return self.prompt_ids + self.response_ids

    @property
    def conversation(self) -> list[Message]:
        """The messages so far, which a reward model scores."""
        return [*self.sample.prompt, *(message for turn in self.turns for message in turn.messages)]

    @property
    def num_turns(self) -> int:
        """Turns as verl counts them: a plain answer is 2, one tool round is 4."""
        return self.user_turns + len(self.turns) + 1

    def extend_prompt(self, text: str) -> None:
        """Append a text to the prompt: to its last message if that is the user's, else as a user's message."""
        if not text:
            return
        *before, last = self.sample.prompt
        if last.role == "user":
            messages = [*before, last.model_copy(update={"content": f"{last.content}\n\n{text}"})]
        else:
            messages = [*before, last, Message(role="user", content=text)]
        sample = self.sample.model_copy(update={"prompt": messages})
        self.request = self.request.model_copy(update={"sample": sample})

    def add_prompt(self, ids: Sequence[int]) -> None:
        """Start with the rendered prompt, truncated to its limit if allowed.

        Raises:
            TrackwayError: `invalid_request` when it exceeds `max_prompt_length` and truncation is off.
        """
        limit, side = self.limits.max_prompt_length, self.limits.prompt_truncation
        self.prompt_ids = list(ids) if side == "error" else cut_prompt(ids, limit, side)
        if len(self.prompt_ids) > limit:
            raise self.prompt_too_long(len(ids))

    def prompt_too_long(self, tokens: int) -> TrackwayError:
        """The error for a prompt of at least this many tokens."""
        limit = self.limits.max_rendered
        remedy = "raise the limit or filter the row out"
        if limit == self.limits.max_prompt_length:
            remedy = "raise the limit, filter the row out, or let the prompt be cut (prompt_truncation)"
        message = f"expected a prompt of at most {limit} tokens (max_prompt_length), got {tokens}; {remedy}"
        return TrackwayError(ErrorCode.INVALID_REQUEST, message)

    def add_generated(self, choice: GenerateChoice) -> None:
        """Append generated tokens.

        Raises:
            TrackwayError: `internal` when ids and logprobs do not match, or there are more ids than requested;
                `not_finite` for a logprob that is not a finite number.
        """
        logprobs = choice.token_logprobs
        if len(logprobs) != len(choice.token_ids) or len(logprobs) > self.room:
            message = (
                f"expected at most {self.room} token ids and a logprob for each, got {len(choice.token_ids)} ids "
                f"and {len(logprobs)} logprobs; the rollout service answered wrongly"
            )
            raise TrackwayError(ErrorCode.INTERNAL, message)
        require_trainable("the engine's logprobs", logprobs)
        start = len(self.response_ids)
        self._append(choice.token_ids, 1, logprobs)
        if self.sampling_params.logprobs:
            self.top_logprobs += choice.top_logprobs
        self.weight_versions += [span.moved(start) if start else span for span in choice.weight_versions]
        self.shown = len(self.prompt_ids) + len(self.response_ids)

    def add_usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count another turn of a model that returns no token ids. An observation counts from the next turn on."""
        first, generated = (self.usage.prompt_tokens, self.usage.generated_tokens) if self.usage else (prompt_tokens, 0)
        self.usage = TokenUsage(
            prompt_tokens=first,
            response_tokens=prompt_tokens + completion_tokens - first,
            generated_tokens=generated + completion_tokens,
        )

    def add_observation(self, ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Append an observation. False, and nothing appended, if no token would be left for an answer (as verl)."""
        if len(ids) >= self.room:
            return False
        self._append(ids, 0, [0.0] * len(ids))
        self.turns[-1].messages.extend(messages)
        self.user_turns += 1
        return True

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.response_ids.extend(ids)
        self.response_mask.extend([mask] * len(ids))
        self.response_logprobs.extend(logprobs)

    def written(self) -> list[list[int]]:
        """The generated ids of each turn, in the order of the rows."""
        return [self.response_ids[turn.response_start : turn.response_end] for turn in self.turns]

    def set_reward(
        self, score: float, *, turn_scores: Sequence[float] = (), token_scores: Sequence[float] = ()
    ) -> None:
        """Score the trajectory, so that the reward service is not asked. `not_finite` for another number.

        Parts of the score may stand at the last token of each turn of the model, or at each token of the response.
        """
        require_trainable("the loop's reward_score", [score, *turn_scores, *token_scores])
        self.reward = Reward(score=score, turn_scores=[*turn_scores], token_scores=[*token_scores])

    def fail(self, error: TrackwayError) -> None:
        """End with an error, which excludes the trajectory from the update."""
        self.stop_reason = StopReason.ERROR
        self.error = error.to_reply().error
        self.reward = None

    def _is_short(self) -> bool:
        """A rejected prompt is left out of the reply. It could be long, and is the same in each rollout."""
        return sum(len(message.content) for message in self.sample.prompt) <= _SHORT_PROMPT_CHARS

    def trajectory(self) -> Trajectory:
        """The wire form. The loop adds the trace."""
        return Trajectory(
            id=self.id,
            session_id=self.id,
            tags=self.tags,
            agent_name=self.agent_name,
            data_source=self.sample.data_source,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            weight_versions=self.weight_versions,
            prompt_messages=self.sample.prompt if self.prompt_ids or self._is_short() else [],
            turns=self.turns,
            reward=self.reward,
            ground_truth=self.sample.reward_model.ground_truth,
            usage=self.usage,
            offered_tools=[schema.function.name for schema in self.tools],
            tool_rewards=self.tool_rewards,
            num_turns=self.num_turns,
            stop_reason=self.stop_reason,
            timings=self.timings,
            error=self.error,
        )


@dataclass
class TurnEpisode(Episode):
    """One generation of a trajectory with its own prompt, turn and sampling parameters."""

    own_turn: int = 0
    own_params: SamplingParams = field(default_factory=SamplingParams)
    last_answer: GenerateChoice | None = None
    """Last answer of the engine."""

    @classmethod
    def of(cls, whole: Episode, turn: int, prompt_ids: list[int], params: SamplingParams) -> Self:
        """Return the generation number `turn` of an episode. The list of ids is kept, not copied."""
        part = cls(whole.request, whole.tags, whole.agent_name, whole.deadline, timings=whole.timings)
        part.prompt_ids, part.own_turn, part.own_params = prompt_ids, turn, params
        return part

    @property
    def sampling_params(self) -> SamplingParams:
        """Its own parameters, instead of the request's."""
        return self.own_params

    @property
    def turn(self) -> int:
        """Its number."""
        return self.own_turn

    def add_generated(self, choice: GenerateChoice) -> None:
        """Append generated tokens, and keep the answer."""
        super().add_generated(choice)
        self.last_answer = choice


def cut_prompt(ids: Sequence[int], limit: int, side: Literal["left", "right", "middle"]) -> list[int]:
    """At most `limit` of the ids, truncated as verl does. `middle` keeps the odd token at the end."""
    if len(ids) <= limit:
        return list(ids)
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]
