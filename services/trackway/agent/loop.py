"""The base of agent loops: root span, time limit, generation, scoring, and the final trajectory.

A custom loop subclasses `AgentLoop`, implements `converse`, and is registered under an `agent_name`, the column of the
dataset (verl's). Each instance runs one trajectory. An exception ends only that trajectory, which is returned with
`error` set and is traced.
"""

import asyncio
import hashlib
import inspect
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import ClassVar, TypeVar

from trackway.agent.context import AgentContext
from trackway.agent.episode import Episode, waits_for
from trackway.agent.models import ChatAnswer, ChatModel, mean_kl
from trackway.agent.toolbox import Toolbox, tool_facts
from trackway.chat.tokenizer import TooLong
from trackway.chat.tool_calls import Parsed, ParsedCall
from trackway.serving.user_code import located, run_user_code
from trackway.tracing import (
    SpanHandle,
    add_incident,
    chat_span,
    reward_span,
    set_outcome,
    set_tools,
    token2text,
    trajectory_span,
)
from trackway.tracing.attributes import IS_BASELINE, POLICY, PROVIDER, STOP_REASON, group_id
from trackway.tracing.spans import operation_span
from trackway.wire.agent import AgentInfo, GroupRequest, Teacher
from trackway.wire.chat import FunctionCall, Message, ToolCall, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest
from trackway.wire.rollout import GenerateChoice, GeneratePiece, GenerateRequest
from trackway.wire.trajectory import (
    Incident,
    Reward,
    StopReason,
    Tags,
    TeacherScores,
    Timings,
    Trajectory,
    require_trainable,
)

logger = logging.getLogger("trackway.agent")

Loop = TypeVar("Loop", bound="type[AgentLoop]")

DEFAULT_AGENT = "single_turn_agent"
"""The loop for rows without `agent_name`, as verl's `rollout.agent.default_agent_loop`."""

_ABORTED = "aborted"

_PAUSE_S = 0.2
"""Delay before an aborted generation is continued, while the engine loads weights."""


class AgentLoop(ABC):
    """One conversation between the model and its environment.

    `converse` appends a `Turn` to `episode.turns` for each turn. `self.services.parser.parse(text)` returns the tool
    calls of a text, and `toolbox.answer(calls, tools, limit)` runs them. `self.services.tokens` converts text to token
    ids, and its `observation` returns the ids between two turns of the model.
    """

    agent_name: ClassVar[str]
    offers_tools: ClassVar[bool] = False
    """True if it shows the model the tool server's tools."""
    generates_alone: ClassVar[bool] = False
    """True if its generations do not begin together with other rollouts' of the group."""

    speaks_messages: ClassVar[bool] = False
    """True if it also runs with a model that speaks messages, by `ask`."""
    episode_class: ClassVar[type[Episode]] = Episode

    def __init__(self, services: AgentContext) -> None:
        self.services = services

    @abstractmethod
    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """Extend the episode until it ends. Returns the stop reason. An exception ends it with an error."""

    async def run(self, request: GroupRequest, rollout_n: int) -> Trajectory:
        """One rollout, scored and traced. Raises only asyncio.CancelledError."""
        episode = self.episode_class.begin(request, rollout_n, self.agent_name)
        with trajectory_span(
            episode.tags,
            episode.id,
            self.agent_name,
            request.sample.prompt,
            request.trace,
            request.trace_target,
        ) as span:
            if request.is_baseline:
                span.tag(IS_BASELINE, True)
            if request.policy is not None:
                span.tag(POLICY, request.policy)
            try:
                taught = await self._live(episode)
                await self._tell(span, episode)
            except asyncio.CancelledError:
                # The texts are skipped on cancellation; the span is marked ERROR by the exception.
                set_outcome(span, _ABORTED)
                span.outputs(_ending(episode, _ABORTED))
                raise
        return _with_trace(_with_teacher(episode.trajectory(), taught), span)

    async def _live(self, episode: Episode) -> list[TeacherScores]:
        """Run the episode to its end. Return what a teacher said of each row; empty without one, or after an error."""
        release_s = self.services.settings.release_timeout_s
        toolbox = Toolbox(self.services.tools, episode.sample, episode.id, episode.deadline, release_s)
        try:
            with Stopwatch(episode.timings, "total"):
                async with asyncio.timeout(episode.deadline.remaining):
                    episode.stop_reason = await run_user_code(lambda: self.converse(episode, toolbox))
                    if episode.reward is None:
                        episode.reward = await self._score(episode, toolbox)
                    else:
                        self._trace_reward(episode.reward)
                    if episode.request.teacher is not None:
                        return await self._taught(episode, episode.request.teacher)
        except Exception as error:
            episode.fail(_named(error, episode))
        finally:
            self.services.rollout.release(episode.id)
            if self.services.limiter is not None:
                self.services.limiter.release(episode.id)
            await toolbox.release()
        return []

    async def _taught(self, episode: Episode, teacher: Teacher) -> list[TeacherScores]:
        rows = episode.trajectory().rows
        with waits_for(f"teacher {teacher.name!r}", episode.deadline), operation_span("teacher") as span:
            scores = await self.services.teachers.scores(teacher, rows, group_id(episode.tags), episode.deadline)
            tokens = sum(len(score.logprobs) for score in scores)
            span.outputs({"teacher": teacher.name, "tokens": tokens, "kl": mean_kl(rows, scores)})
        return scores

    async def begin(self, episode: Episode, schemas: Sequence[ToolSchema] = ()) -> None:
        """Render the prompt.

        Raises:
            TrackwayError: `invalid_request` when it exceeds its limit, or the limit of truncation.
        """
        set_tools(schemas)
        episode.tools = schemas
        if self.speaks_messages and self.services.chat is not None:
            return
        try:
            ids = await self.services.tokens.prompt(episode.sample.prompt, schemas, episode.limits.max_rendered)
        except TooLong as error:
            raise episode.prompt_too_long(error.at_least) from error
        episode.add_prompt(ids)
        if len(episode.prompt_ids) < len(ids):
            side = episode.limits.prompt_truncation
            add_incident(Incident.PROMPT_CUT, tokens=len(ids), kept=len(episode.prompt_ids), side=side)

    async def generate(self, episode: Episode, told: Callable[[GeneratePiece], None] | None = None) -> str:
        """Generate one assistant turn and append it. Returns the finish reason.

        A turn that the engine aborted (while it is paused for new weights) is resumed. `told` gets its tokens as they
        come, without a finish reason.
        """
        start = len(episode.response_ids)
        turn = episode.turn
        if not episode.context:
            raise ValueError("expected a prompt before the first turn, got none; call `await self.begin(episode, ...)`")
        with (
            Stopwatch(episode.timings, "generate_sequences"),
            waits_for(f"the rollout service, turn {turn}", episode.deadline),
        ):
            for part in itertools.count():
                written = len(episode.response_ids) - start
                max_tokens = min(episode.sampling_params.max_tokens - written, episode.room)
                if max_tokens < 1:
                    break
                limiter = self.services.limiter
                if limiter is not None:
                    limiter.begin_turn(episode.id, len(episode.context), time.monotonic())
                choice = await self._generate_part(episode, max_tokens, part, told)
                if limiter is not None:
                    limiter.end_turn(episode.id, len(choice.token_ids), time.monotonic())
                episode.add_generated(choice)
                if choice.finish_reason != "abort":
                    return choice.finish_reason
                if episode.sampling_params.structured_outputs is not None:
                    message = "the guided answer was cut, and its grammar cannot be entered in the middle; retry"
                    raise TrackwayError(ErrorCode.UNAVAILABLE, message)
                add_incident(Incident.GENERATION_CUT, tokens=len(choice.token_ids))
                await asyncio.sleep(_PAUSE_S)
        return "length"

    async def ask(self, episode: Episode, chat: ChatModel) -> ChatAnswer:
        """The answer of a model that speaks messages to the conversation so far. Raises TrackwayError."""
        if not episode.tags.validation:
            message = "chat_model: expected an evaluation, got a training rollout; its server returns no token ids"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        params, turn = episode.sampling_params, episode.turn
        seed, max_tokens = request_seed(params.seed, episode.tags, turn), min(params.max_tokens, episode.room)
        params = params.model_copy(update={"max_tokens": max_tokens, "seed": seed})
        with (
            Stopwatch(episode.timings, "generate_sequences"),
            waits_for(f"the model at {chat.base_url}, turn {turn}", episode.deadline),
            chat_span(chat.model, params) as span,
        ):
            span.set(PROVIDER, "openai")
            shows_text = span.recording and token2text()
            if shows_text:
                span.inputs({"messages": episode.turns[-1].messages[1:] if turn else episode.conversation})
            deadline = episode.deadline.earlier(chat.policy.total_s)
            answer = await chat.answer(episode.conversation, episode.tools, params, deadline)
            if shows_text:
                span.outputs({"messages": [assistant_message(answer.parsed, turn)]})
            span.usage(answer.prompt_tokens, answer.completion_tokens)
            span.finish_reasons([answer.finish_reason])
        episode.add_usage(answer.prompt_tokens, answer.completion_tokens)
        return answer

    async def _generate_part(
        self, episode: Episode, max_tokens: int, part: int, told: Callable[[GeneratePiece], None] | None
    ) -> GenerateChoice:
        turn = episode.turn
        params = episode.sampling_params
        seed = request_seed(params.seed, episode.tags, turn, part)
        if (max_tokens, seed) != (params.max_tokens, params.seed):
            params = params.model_copy(update={"max_tokens": max_tokens, "seed": seed})
        request = GenerateRequest(
            request_id=f"{episode.id}/{turn}" if part == 0 else f"{episode.id}/{turn}+{part}",
            model=episode.request.policy,
            token_ids=episode.context,
            sampling_params=params,
            min_weight_version=episode.request.min_weight_version,
            context_start=episode.shown,
        )
        rollout = self.services.rollout
        deadline = episode.deadline.earlier(rollout.policy.total_s)
        # A group's trajectories share their prompt, and so a replica's cache of it.
        group = group_id(episode.tags)
        if told is None:
            alone = self.generates_alone
            reply = await rollout.generate(
                request, session_id=group, deadline=deadline, trajectory=episode.id, alone=alone
            )
            return reply.choices[0]
        pieces: list[GeneratePiece] = []
        arriving = rollout.stream_generation(request, session_id=group, deadline=deadline, trajectory=episode.id)
        async with aclosing(arriving):
            async for piece in arriving:
                pieces.append(piece)
                told(piece.model_copy(update={"finish_reason": None}))
        return GenerateChoice.of(pieces)

    def _trace_reward(self, reward: Reward) -> None:
        """The span of a reward that the loop, its environment or a session's agent gave."""
        with reward_span(self.agent_name) as span:
            span.score(reward.score)
            span.outputs({"score": reward.score, **reward.components})

    async def _score(self, episode: Episode, toolbox: Toolbox) -> Reward:
        """The reward service's score of the generated text. Tool rewards are its components."""
        with Stopwatch(episode.timings, "compute_score"), waits_for("the reward service", episode.deadline):
            rewards = await toolbox.rewards()
            turns = (
                [turn.messages[0].content for turn in episode.turns]
                if episode.usage
                else [await self.services.tokens.plain_text(ids) for ids in episode.written()]
            )
            sample = episode.sample
            request = ScoreRequest(
                data_source=sample.data_source,
                solution_str="".join(turns),
                ground_truth=sample.reward_model.ground_truth,
                trajectory_id=episode.id,
                messages=episode.conversation,
                extra_info={
                    **sample.extra_info,
                    "tool_rewards": list(episode.tool_rewards),
                    **tool_facts(toolbox.records, rewards),
                    "num_turns": episode.num_turns,
                    "turns": [*turns],
                },
            )
            deadline = episode.deadline.earlier(self.services.reward.policy.total_s)
            session_id = group_id(episode.tags)  # scores of a group that are due together go together
            reward = await self.services.reward.score(request, session_id=session_id, deadline=deadline)
        require_trainable("the score", [reward.score])
        tools = {f"tool/{name}": value for name, value in rewards.items()}
        return reward.model_copy(update={"components": {**tools, **reward.components}})

    async def _tell(self, span: SpanHandle, episode: Episode) -> None:
        """Record on the root span how the trajectory ended."""
        if not span.recording:
            return
        set_outcome(span, None if episode.error is None else f"error:{episode.error.code.value}")
        span.set(STOP_REASON, episode.stop_reason.value)
        if episode.error is not None:
            span.error(episode.error.message, episode.error.code.value)
        texts = await self._texts(span, episode) if token2text() else {}
        span.outputs({**_ending(episode, episode.stop_reason.value), **texts})

    async def _texts(self, span: SpanHandle, episode: Episode) -> dict[str, object]:
        """The messages after the prompt. For a loop that keeps none, the decoded response."""
        prompt, conversation = episode.sample.prompt, episode.conversation
        if conversation[: len(prompt)] == prompt:
            conversation = conversation[len(prompt) :]
        if conversation:
            return {"messages": conversation}
        try:
            text = await self.services.tokens.text(episode.response_ids)
            return {"messages": [Message(role="assistant", content=text)]}
        except Exception as error:
            # Ids unknown to the tokenizer must not fail the other trajectories of the group.
            span.event("text_unavailable", reason=f"{type(error).__name__}: {error}")
            return {}


_AGENTS: dict[str, type[AgentLoop]] = {}


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Class decorator: register the loop under this `agent_name`."""

    def add(loop: Loop) -> Loop:
        loop.agent_name = agent_name
        _AGENTS[agent_name] = loop
        return loop

    return add


def agent_loop(agent_name: str | None) -> type[AgentLoop]:
    """The loop of that name, or the default loop for None.

    Raises:
        TrackwayError: `unknown_agent` when there is none.
    """
    name = agent_name or DEFAULT_AGENT
    if name not in _AGENTS:
        message = f"agent_name: expected one of {sorted(_AGENTS)}, got {name!r}; register yours with @register"
        raise TrackwayError(ErrorCode.UNKNOWN_AGENT, message)
    return _AGENTS[name]


def request_seed(base: int | None, tags: Tags, turn: int, part: int = 0) -> int | None:
    """32 bits of SHA-256 over (base, validation, step, sample_index, rollout_n, turn). None stays None.

    The run's name and the rest of the batch are not part of it, so repeating a step draws the same tokens. `part`
    counts the continuations of an aborted turn. The first part's seed does not depend on it.
    """
    if base is None:
        return None
    turn_name = f"{turn}" if part == 0 else f"{turn}+{part}"
    source = f"{base}/{tags.validation}/{tags.step}/{tags.sample_index}/{tags.rollout_n}/{turn_name}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4])


def agents() -> list[AgentInfo]:
    """The registered loops and the first line of each docstring."""
    return [
        AgentInfo(
            name=name,
            description=(inspect.getdoc(loop) or "").partition("\n")[0],
            offers_tools=loop.offers_tools,
        )
        for name, loop in sorted(_AGENTS.items())
    ]


class Stopwatch(AbstractContextManager[None]):
    """Add the block's duration in seconds to a field of the timings."""

    def __init__(self, timings: Timings, activity: str) -> None:
        self._timings, self._activity = timings, activity

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        lasted = time.perf_counter() - self._started
        setattr(self._timings, self._activity, getattr(self._timings, self._activity) + lasted)


def with_ids(parsed: Parsed, turn: int) -> dict[str, ParsedCall]:
    """The calls of a turn by their ids."""
    return {call_id(turn, place): call for place, call in enumerate(parsed.calls)}


def call_id(turn: int, place: int) -> str:
    """The id of a call: nine letters and digits, which Mistral's chat templates require."""
    return f"call{turn:03}{place:02}"


def assistant_message(parsed: Parsed, turn: int) -> Message:
    """The message of a turn, its calls numbered."""
    calls = [
        ToolCall(id=named, function=FunctionCall(name=call.name, arguments=call.raw))
        for named, call in with_ids(parsed, turn).items()
    ]
    return Message(role="assistant", content=parsed.content, tool_calls=calls or None)


def _ending(episode: Episode, stop_reason: str) -> dict[str, float | str | None]:
    """The trajectory's counters when it ended."""
    return {
        "reward": episode.reward.score if episode.reward else None,
        "num_turns": episode.num_turns,
        "stop_reason": stop_reason,
        "prompt_tokens": episode.usage.prompt_tokens if episode.usage else len(episode.prompt_ids),
        "response_tokens": episode.usage.response_tokens if episode.usage else len(episode.response_ids),
    }


def _with_teacher(trajectory: Trajectory, scores: Sequence[TeacherScores]) -> Trajectory:
    """The trajectory with a teacher's scores of its rows, if there are any."""
    if not scores:
        return trajectory
    further = [
        row.model_copy(update={"teacher": score})
        for row, score in zip(trajectory.further_rows, scores[1:], strict=True)
    ]
    return trajectory.model_copy(update={"teacher": scores[0], "further_rows": further})


def _with_trace(trajectory: Trajectory, root: SpanHandle) -> Trajectory:
    """The trajectory with its trace counts, once the root span has ended."""
    sums = root.trace_stats
    trace = {"trace_id": root.trace_id, "span_id": root.span_id, "trace_bytes": sums.bytes}
    recovered = {"incidents": sorted(sums.incidents), "incident_services": sums.incident_services}
    return trajectory.model_copy(update={**trace, **recovered})


def _named(error: Exception, episode: Episode) -> TrackwayError:
    """The error with its code. Unexpected exceptions are logged once, with traceback."""
    if isinstance(error, TrackwayError):
        return error
    if isinstance(error, TimeoutError):
        message = (
            f"expected the trajectory to end within {episode.limits.timeout_s:g} s (limits.timeout_s), still running "
            f"in turn {len(episode.turns)}; raise the limit, or look for the slow span in its trace"
        )
        return TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message)
    logger.error("trajectory %s failed", episode.id, exc_info=error)
    message = f"agent loop {episode.agent_name!r} failed: {located(error)}; the agent service logged the traceback"
    return TrackwayError(ErrorCode.INTERNAL, message)
