"""One session: its calls of the model, each placed in the token graph, generated under its root span, and recorded.

A retry is answered from the record: the same body again, `stream` aside, after a connection that broke before the whole
answer was sent, or with a header `x-stainless-retry-count` above 0, as OpenAI's and Anthropic's clients send it. Any
other call with the same body is a new one. Sampling is the run's. A call beyond a bound is refused, and the session
ends with the bound's name. A call of which nothing was recorded, such as one that the engine refused, does not count.
"""

import asyncio
import hashlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import Request, Response
from opentelemetry import trace

from trackway.agent.episode import Episode, TurnEpisode
from trackway.agent.sessions.delivery import CallAnswer, DeliveredResponse, Recorded, WaitingStream
from trackway.agent.sessions.graph import (
    ChatReader,
    Conversation,
    Conversations,
    Place,
    Sampled,
    TokenGraph,
    is_auxiliary,
    joined_turns,
    meaning,
)
from trackway.chat.tokenizer import ChatTokenizer, TooLong
from trackway.chat.tokens import ChatTokens
from trackway.model_api.choices import KEEP_ALIVE_S, jobs_of, respond, respond_again, while_connected
from trackway.model_api.openai.completions import CompletionResponseBuilder
from trackway.model_api.prompts import chat_ids, forced_prefix, template_form, text_ids
from trackway.model_api.response_builder import Failed, ResponseBuilder
from trackway.model_api.stream_decoder import Delta
from trackway.serving.auth import RawHeaders
from trackway.serving.user_code import own_context
from trackway.tracing import inject, set_tools, turn_span
from trackway.tracing.attributes import COMPACTED
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatMessage, ChatRequest, ChatTool, CompletionRequest, SampledRequest
from trackway.wire.responses import InputItem, InputItemReference
from trackway.wire.rollout import (
    GenerateChoice,
    GeneratePiece,
    GenerateReply,
    GenerateRequest,
    Usage,
    choice_logprobs,
)
from trackway.wire.sessions import FormatUse, GraphNode, NodeKind, SessionBounds, SessionResponse
from trackway.wire.trajectory import StopReason, TokenRow, Trajectory


class TokenBudget:
    """`most` tokens, or any number for None."""

    def __init__(self, most: int | None) -> None:
        self._left = most
        self._reserved = 0
        self._changed = asyncio.Event()

    def must_wait(self, wanted: int, choices: int) -> bool:
        """Return whether other calls hold some of what a call wants: `wanted` tokens for each of its choices."""
        return self._left is not None and self._reserved > 0 and (self._left - self._reserved) // choices < wanted

    async def freed(self, wanted: int, choices: int, ended: asyncio.Event) -> None:
        """Wait until a call need not wait for others, at most until the session has ended."""
        while self.must_wait(wanted, choices) and not ended.is_set():
            self._changed.clear()
            await self._changed.wait()

    def reserve(self, wanted: int, choices: int) -> int:
        """Tokens for each choice of a call: `wanted`, or what is left if that is fewer; 0 when none is left."""
        if self._left is None:
            return wanted
        room = min(wanted, max(0, self._left - self._reserved) // choices)
        self._reserved += room * choices
        return room

    def written(self, tokens: int) -> None:
        """Take off what a call wrote."""
        if self._left is not None:
            self._left -= tokens

    def release(self, tokens: int) -> None:
        """Give back what a call reserved, once it has ended."""
        self._reserved -= tokens
        self._changed.set()

    def wake(self) -> None:
        """Let waiting calls see that the session has ended."""
        self._changed.set()


Generate = Callable[[Episode, Callable[[GeneratePiece], None] | None], Awaitable[str]]
"""AgentLoop.generate."""
Build = Callable[[ChatRequest, ChatTokenizer, list[int]], ResponseBuilder]
"""Makes the builder of a response in the format of the route, for a prompt of these ids."""

_OF_THE_CALL = ("max_tokens", "stop_token_ids", "logprobs", "structured_outputs")
"""Sampling parameters that the call may choose. The others are the run's."""
_FOREIGN_IDS = (b"session-id", b"session_id", b"session-affinity", b"thread-id", b"conversation-id", b"user-agent")
"""Endings of headers that are recorded as attributes."""
_GAVE_WAY = "it was idle for longest and made room for another session (max_sessions)"
_MAX_ATTRIBUTES = 32
_MAX_ATTRIBUTE_CHARS = 256
_MAX_FIELDS = 64
_MAX_FIELD_CHARS = 64
RETRY_COUNT = "x-stainless-retry-count"
"""Header in which OpenAI's and Anthropic's clients count the retries of a call."""
_BESIDE = 8
"""Retries and token counts that a session answers, for each of its `bounds.max_calls`."""


class Placed(NamedTuple):
    """A prompt in the graph."""

    place: Place
    shown: int
    """Tokens that it continues."""
    new: list[int]
    ids: list[int]
    """The whole prompt."""


@dataclass
class CallInProgress:
    """A call in progress."""

    request: Request
    stream: bool
    """True to send it as events."""
    answer: CallAnswer
    repeats: CallAnswer | None = None
    """The answer to the call that it is a retry of."""
    reserved: int = 0
    """Tokens of the session's budget."""
    recorded: bool = False
    """True if a part of it is in the graph."""

    @classmethod
    def begin(cls, request: Request, *, stream: bool) -> "CallInProgress":
        """A call that has not been answered."""
        return cls(request, stream, CallAnswer(asyncio.get_running_loop().create_future()))

    @property
    def is_retry(self) -> bool:
        """Return whether its client says so."""
        count = self.request.headers.get(RETRY_COUNT, "")
        return count.isdecimal() and count.strip("0") != ""


@dataclass
class SessionEpisode(Episode):
    """The trajectory that the calls of a session become."""

    further_rows: list[TokenRow] = field(default_factory=list)
    """Other rows of the session."""
    said: list[Message] | None = None
    """The conversation of the last call, which need not begin with the row's prompt."""
    log: str = ""
    """The end of an external agent's output."""

    @property
    def conversation(self) -> list[Message]:
        """The messages so far, which a reward model scores."""
        return super().conversation if self.said is None else self.said

    @property
    def num_turns(self) -> int:
        """Turns of all rows, as verl counts them."""
        return super().num_turns + sum(len(row.turns) for row in self.further_rows)

    def written(self) -> list[list[int]]:
        """Return the generated ids of each turn, in the order of the rows."""
        rows = ((row.response_ids, turn) for row in self.further_rows for turn in row.turns)
        return super().written() + [ids[turn.response_start : turn.response_end] for ids, turn in rows]

    def trajectory(self) -> Trajectory:
        """Return the wire form with the further rows and the log."""
        return super().trajectory().model_copy(update={"further_rows": self.further_rows, "log": self.log})


class Session:
    """The calls of one agent. `generate` continues `episode`, the trajectory that the calls become.

    Created in the task of the trajectory: calls arrive in tasks of their own and run in a copy of its context, under
    its root span.
    """

    def __init__(
        self,
        generate: Generate,
        tokens: ChatTokens,
        episode: SessionEpisode,
        bounds: SessionBounds,
        replica: str,
        formats: FormatUse,
    ) -> None:
        self.id = f"s-{replica}-{secrets.token_hex(16)}"
        self.key = f"sk-{self.id}-{secrets.token_hex(16)}"
        self.episode = episode
        self.graph = TokenGraph()
        self.chats = ChatReader()
        """Reads its chat calls."""
        self.messages: dict[int, Message] = {}
        """The message of each sampled node of a chat, as the client got it."""
        self.attributes: dict[str, str] = {}
        self.ignored_fields: set[str] = set()
        self.limit: StopReason | None = None
        """The bound that was reached first."""
        self.refused: TrackwayError | None = None
        """The error of the call that exceeded it."""
        self.failed: TrackwayError | None = None
        """The error of the last generation that failed."""
        self.conversation: list[ChatMessage] | None = None
        """The messages of the last answered call of chat that is not auxiliary, its answer included."""
        self.ended = asyncio.Event()
        """Set when the agent has ended. No call is taken then."""
        self.gave_way = False
        """True if it ended to make room for another session."""
        self._generate, self._tokens = generate, tokens
        self._bounds = bounds
        self._guides = formats == "guide"
        self._context = own_context()
        self._root = trace.get_current_span().get_span_context()
        self._answers: dict[bytes, list[CallAnswer]] = {}
        """Answers by the body of their call: in progress or recorded, in their order."""
        self._left: deque[bytes] = deque(maxlen=bounds.max_calls)
        """The bodies of calls whose client left before the end: their retries are generated."""
        self._responses: dict[str, list[ChatMessage]] = {}
        """The messages of each answered response, its own included, by its id."""
        self._items: dict[str, InputItem] = {}
        """The items of these responses, by their ids."""
        self._conversations = Conversations()
        self._turns = itertools.count()
        self._offered: list[ChatTool] = []
        """The tools of the last chat call, whose definitions are on its span."""
        self._generating: set[asyncio.Task[Any]] = set()
        self._budget = TokenBudget(bounds.max_tokens)
        self._sampled_nodes: dict[str, list[GraphNode]] = {}
        """The choices of each answered call, by the id of its response."""
        self._calls = 0
        """Calls in progress or recorded."""
        self._beside = 0
        """Retries and token counts."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer."""
        return self._tokens.fast

    @property
    def traceparent(self) -> str | None:
        """The root span as a header, or None when the session is not traced."""
        carried: dict[str, str] = {}
        self._context.copy().run(inject, carried)
        return carried.get("traceparent") if self._root.trace_flags.sampled else None

    def owns(self, key: str) -> bool:
        """Return whether this is the session's key."""
        return secrets.compare_digest(key.encode(), self.key.encode())

    def give_way(self) -> None:
        """End, since another session needs the room."""
        self.gave_way = True
        self.ended.set()

    async def until_ended(self) -> None:
        """Wait for the end. Raises AGENT_FAILED when it came to make room for another session."""
        await self.ended.wait()
        if self.gave_way:
            message = f"expected the session to be ended by its client, {_GAVE_WAY}"
            raise TrackwayError(ErrorCode.AGENT_FAILED, f"{message}; end sessions sooner, or raise it")

    def close(self) -> None:
        """Take no further call and abort those that generate."""
        self.ended.set()
        self._budget.wake()
        for task in self._generating:
            task.cancel()

    def note_headers(self, headers: RawHeaders) -> None:
        """Record ids of the agent's own, at most 32."""
        for raw, value in headers:
            if raw.endswith(_FOREIGN_IDS):
                name = raw.decode("latin-1")
                if name in self.attributes or len(self.attributes) < _MAX_ATTRIBUTES:
                    self.attributes[name] = value.decode("latin-1")[:_MAX_ATTRIBUTE_CHARS]

    def note_fields(self, names: Iterable[str]) -> None:
        """Record fields of a call that had no effect, at most 64."""
        short = {name[:_MAX_FIELD_CHARS] for name in names} - self.ignored_fields
        self.ignored_fields.update(sorted(short)[: _MAX_FIELDS - len(self.ignored_fields)])

    def formatted(self, chat: ChatRequest, field: str) -> ChatRequest:
        """The chat without the format that would guide its answer, where formats are only noted: under this name."""
        if self._guides or not chat.is_guided:
            return chat
        self.note_fields([field])
        return chat.model_copy(update={"response_format": None})

    async def count(self, chat: ChatRequest) -> int:
        """The tokens of a conversation as a prompt, of at most the session's context length. An auxiliary call."""
        self._admit_beside()
        self.graph.beside(NodeKind.AUXILIARY, self._number())
        limits = self.episode.limits
        longest = limits.max_prompt_length + limits.max_response_length
        try:
            return len(await chat_ids(self.tokenizer, self._forced_chat(chat), longest))
        except TooLong as error:
            bound = f"at most {longest} tokens (limits.max_prompt_length and limits.max_response_length)"
            message = f"messages: expected {bound}, got at least {error.at_least}; shorten them, or raise the limits"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="messages") from error

    def earlier(self, response_id: str | None, *, keep_system: bool) -> list[ChatMessage]:
        """The messages of `previous_response_id`. Raises INVALID_REQUEST for one that this session did not answer."""
        if response_id is None:
            return []
        if response_id not in self._responses:
            message = (
                f"previous_response_id: expected a response of this session, got {response_id[:80]!r}; send the input"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="previous_response_id")
        messages = self._responses[response_id]
        return [message for message in messages if keep_system or message.role not in ("system", "developer")]

    def with_items(self, body: SessionResponse) -> SessionResponse:
        """The call with the items that its references name. Raises INVALID_REQUEST for one of no answered response."""
        if isinstance(body.input, str):
            return body
        items: list[InputItem] = []
        for place, item in enumerate(body.input):
            if isinstance(item, InputItemReference):
                if item.id not in self._items:
                    message = f"input[{place}]: expected an item of a response of this session, got {item.id[:80]!r}"
                    raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; send the item itself", param="input")
                items.append(self._items[item.id])
            else:
                items.append(item)
        return body.model_copy(update={"input": items})

    def score_call(self, call_id: str, score: float) -> None:
        """Note the score of an answered call. Raises NOT_FOUND for an id that this session did not give."""
        if call_id not in self._sampled_nodes:
            message = f"call_id: expected the id of a response of this session, got {call_id[:80]!r}"
            raise TrackwayError(ErrorCode.NOT_FOUND, f"{message}; take it from the response")
        for node in self._sampled_nodes[call_id]:
            node.reward = score

    async def answer(self, request: Request, chat: ChatRequest, build: Build, body: str, *, stream: bool) -> Response:
        """The response to one call.

        Args:
            request: the HTTP request.
            chat: the call as messages.
            build: makes the response in the route's format.
            body: what a retry repeats: the route, and the body without `stream`.
            stream: whether to send it as events.

        Raises:
            TrackwayError: `invalid_request` when the session has ended, or the call is beyond a bound or misfits the
                template; the errors of generation.
        """
        return await self._answered(
            CallInProgress.begin(request, stream=stream),
            body,
            lambda call: self._chat(call, chat, build),
            lambda answer: self._chat_again(answer, chat, build, stream=stream),
            lambda error: build(chat, self.tokenizer, []).failed(error),
        )

    async def complete(self, request: Request, asked: CompletionRequest, body: str) -> Response:
        """The response to a call of text completions; arguments and errors as in `answer`."""
        return await self._answered(
            CallInProgress.begin(request, stream=asked.stream),
            body,
            lambda call: self._completion(call, asked),
            lambda answer: self._completion_again(answer, asked),
            lambda error: CompletionResponseBuilder(asked, self.tokenizer, [[]]).failed(error),
        )

    async def _answered(
        self,
        call: CallInProgress,
        body: str,
        first: Callable[[CallInProgress], Awaitable[Response]],
        again: Callable[[CallAnswer], Awaitable[Response]],
        failed: Failed,
    ) -> Response:
        key = hashlib.sha256(body.encode()).digest()
        call.repeats = call.repeats or self._repeated(key, call)
        if call.repeats is not None:
            call.repeats.clients += 1
            try:
                async with asyncio.timeout(KEEP_ALIVE_S if call.stream else None):
                    recorded = await while_connected(call.request, _result(call.repeats.recorded))
                if recorded is not None:
                    self._admit_beside()
                    return await again(call.repeats)
            except TimeoutError:
                return WaitingStream(lambda: self._answered(call, body, first, again, failed), failed)
            finally:
                call.repeats.clients -= 1
            if key in self._left:
                self._left.remove(key)  # this call is generated in its place
        self._admit()
        answers = self._answers.setdefault(key, [])
        answers.append(call.answer)

        def left() -> None:
            self._budget.release(call.reserved)
            self._calls -= not call.recorded
            call.answer.clients -= 1
            if not call.answer.recorded.done():
                answers.remove(call.answer)
                if not answers:
                    del self._answers[key]
                self._left.append(key)
                call.answer.recorded.set_result(None)

        try:
            return DeliveredResponse(await first(call), call.answer, left)
        except BaseException:
            left()
            raise

    def _repeated(self, key: bytes, call: CallInProgress) -> CallAnswer | None:
        """The answer to the call of this body that the call is a retry of, or None for another call."""
        answers = self._answers.get(key, [])
        lost = next((answer for answer in answers if answer.is_lost), None)
        if lost is None and call.is_retry and key in self._left:
            self._left.remove(key)
        elif lost is None and call.is_retry and answers:
            # Each of several calls in progress with one body may be retried.
            in_progress = [answer for answer in answers if answer.clients]
            lost = min(reversed(in_progress), key=lambda answer: answer.retries, default=answers[-1])
            lost.retries += 1
        return lost

    def _admit(self) -> None:
        """Raise INVALID_REQUEST when no further call is taken."""
        if self.ended.is_set():
            raise self._after_end()
        if self._calls >= self._bounds.max_calls:
            raise self._reached(StopReason.MAX_TURNS, f"at most {self._bounds.max_calls} calls (bounds.max_calls)")
        self._calls += 1

    def _admit_beside(self) -> None:
        """Raise INVALID_REQUEST when no further retry or token count is taken."""
        if self.ended.is_set():
            raise self._after_end()
        most = _BESIDE * self._bounds.max_calls
        if self._beside >= most:
            bound = f"at most {most} retries and token counts ({_BESIDE} for each of bounds.max_calls)"
            raise self._reached(StopReason.MAX_TURNS, bound)
        self._beside += 1

    async def _chat(self, call: CallInProgress, chat: ChatRequest, build: Build) -> Response:
        chat = self._forced_chat(chat)
        tools = chat.tools if chat.offers_tools else []
        conversation = self._conversations.of(chat.messages, tools, chat.chat_template_kwargs)
        number, auxiliary = self._number(), is_auxiliary(chat)
        self.graph.has_task |= not auxiliary
        place = self.graph.place(conversation)
        placed = self._placed(place, await self._rendered(place, chat))
        most = self._most_tokens([placed], chat.max_completion_tokens or chat.max_tokens)
        builder = build(chat, self.tokenizer, placed.ids)

        def record(deltas: list[Delta]) -> None:
            call.recorded = any(delta.token_ids or delta.finish_reason for delta in deltas)
            if not call.recorded:
                return
            context = self.graph.context(place, number, placed.new, auxiliary)
            forced = forced_prefix(chat, self.tokenizer.tool_format)
            guided = chat.is_guided
            nodes = [self.graph.sampled(context, number, _sampled(delta, guided), forced) for delta in deltas]
            for node, message in zip(nodes, builder.messages, strict=True):
                self.messages[node.id] = message
            if all(delta.finish_reason for delta in deltas):
                echoes = [_echo(message) for message in builder.messages]
                for node, echo, delta in zip(nodes, echoes, deltas, strict=True):
                    self._continue(node, conversation, echo, delta)
                self._responses[builder.id] = [*chat.messages, echoes[0]]
                self._items |= builder.items
                if not auxiliary:
                    self.conversation = self._responses[builder.id]
                self._sampled_nodes[builder.id] = nodes
                call.answer.recorded.set_result(Recorded(number, deltas, nodes, conversation))

        return await self._respond(call, chat, builder, [placed], most, record)

    def _continue(self, node: GraphNode, conversation: Conversation, echo: ChatMessage, delta: Delta) -> None:
        """Let calls continue the message, also with its stop string, which some clients put back."""
        if delta.stop is not None:
            whole = echo.model_copy(update={"content": echo.text + delta.stop})
            self.graph.continue_message(node, conversation, meaning(whole))
        self.graph.continue_message(node, conversation, self._conversations.meaning(echo))

    async def _completion(self, call: CallInProgress, asked: CompletionRequest) -> Response:
        asked = self._forced(asked)
        self.graph.has_task = True
        number = self._number()
        placed = [await self._continued(asked, prompt) for prompt in asked.prompts]
        most = self._most_tokens(placed, asked.max_tokens)
        builder = CompletionResponseBuilder(asked, self.tokenizer, [prompt.ids for prompt in placed])

        def record(deltas: list[Delta]) -> None:
            call.recorded = any(delta.token_ids or delta.finish_reason for delta in deltas)
            if not call.recorded:
                return
            contexts = [self.graph.context(prompt.place, number, prompt.new) for prompt in placed]
            nodes = [
                self.graph.sampled(contexts[index // asked.n], number, _sampled(delta))
                for index, delta in enumerate(deltas)
            ]
            if all(delta.finish_reason for delta in deltas):
                for index, node in enumerate(nodes):
                    prompt = asked.prompts[index // asked.n]
                    written = self.tokenizer.decode(node.ids, skip_special_tokens=False)
                    self.graph.continue_text(node, prompt + written if isinstance(prompt, str) else None)
                self._sampled_nodes[builder.id] = nodes
                call.answer.recorded.set_result(Recorded(number, deltas, nodes, None))

        return await self._respond(call, asked, builder, placed, most, record)

    async def _continued(self, asked: CompletionRequest, prompt: str | list[int]) -> Placed:
        """The prompt behind what it continues. Only what is new of a text is tokenised."""
        place = self.graph.place_text(prompt)
        new = prompt[place.known :]
        if new or place.parent is None:
            special = asked.add_special_tokens and place.parent is None
            new = await self._within_limits(place, text_ids(self.tokenizer, new, special, self._longest(place)))
        return self._placed(place, [] if isinstance(new, str) else new)

    def _placed(self, place: Place, new: list[int]) -> Placed:
        before = self.graph.ids(place.parent)
        return Placed(place, len(before), new, before + new)

    def _longest(self, place: Place) -> int:
        """The most tokens that a call may add there."""
        limits = self.episode.limits
        return limits.max_prompt_length if place.parent is None else limits.max_response_length

    async def _within_limits(self, place: Place, rendered: Awaitable[list[int]]) -> list[int]:
        """The ids that a call adds. INVALID_REQUEST, and the bound's name for the session, when they are too many."""
        longest = self._longest(place)
        try:
            ids = await rendered
            if place.parent is None and len(ids) > longest:
                raise TooLong(len(ids))
        except TooLong as error:
            got = f"got at least {error.at_least}"
            if place.parent is not None:
                bound = f"a conversation of at most {longest} tokens behind its prompt (limits.max_response_length)"
                raise self._reached(StopReason.MAX_RESPONSE, f"{bound}, {got}") from error
            bound = f"a prompt of at most {longest} tokens (limits.max_prompt_length)"
            raise self._reached(StopReason.MAX_PROMPT, f"{bound}, {got}") from error
        return ids

    async def _respond(
        self,
        call: CallInProgress,
        asked: SampledRequest,
        builder: ResponseBuilder,
        prompts: Sequence[Placed],
        most: int,
        record: Callable[[list[Delta]], None],
    ) -> Response:
        """The response, of at most `most` tokens for each choice. A stream of comments while its budget is held."""
        try:
            max_tokens = await self._reserved(call, most, len(prompts) * asked.n)
        except TimeoutError:
            return WaitingStream(lambda: self._respond(call, asked, builder, prompts, most, record), builder.failed)
        jobs = jobs_of(builder.id, [prompt.ids for prompt in prompts], asked, max_tokens, self.tokenizer)
        model = SessionModel(self, min(prompt.shown for prompt in prompts), trace.get_current_span(), asked)
        context = self._context.copy()
        return await respond(call.request, model, builder, jobs, stream=call.stream, record=record, context=context)

    async def _chat_again(self, answer: CallAnswer, chat: ChatRequest, build: Build, *, stream: bool) -> Response:
        """The recorded answer. Its new ids of tool calls continue the same nodes."""
        recorded = answer.complete
        builder = build(self._forced_chat(chat), self.tokenizer, self._prompts_again(recorded)[0])
        messages = joined_turns(chat.messages)

        def renamed() -> None:
            echoes = [_echo(message) for message in builder.messages]
            self._responses[builder.id] = [*messages, echoes[0]]
            self._items |= builder.items
            for node, echo, delta in zip(recorded.nodes, echoes, recorded.deltas, strict=True):
                assert recorded.conversation is not None
                self._continue(node, recorded.conversation, echo, delta)

        return await self._respond_again(answer, builder, renamed, stream=stream)

    async def _completion_again(self, answer: CallAnswer, asked: CompletionRequest) -> Response:
        prompts = self._prompts_again(answer.complete)[:: asked.n]
        builder = CompletionResponseBuilder(self._forced(asked), self.tokenizer, prompts)
        return await self._respond_again(answer, builder, lambda: None, stream=asked.stream)

    def _prompts_again(self, recorded: Recorded) -> list[list[int]]:
        """The prompt of each choice. The call is noted as a retry."""
        self.graph.beside(NodeKind.RETRY, self._number(), repeats=recorded.number)
        return [self.graph.ids(node.parent) for node in recorded.nodes]

    async def _respond_again(
        self, answer: CallAnswer, builder: ResponseBuilder, before_send: Callable[[], None], *, stream: bool
    ) -> Response:
        self._sampled_nodes[builder.id] = answer.complete.nodes
        response = await respond_again(builder, answer.complete.deltas, stream=stream)
        answer.clients += 1

        def left() -> None:
            answer.clients -= 1

        return DeliveredResponse(response, answer, left, before_send)

    async def _rendered(self, place: Place, chat: ChatRequest) -> list[int]:
        """The ids that the call adds behind its parent, or the whole prompt."""
        if place.parent is None:
            longest = self._longest(place)
            return await self._within_limits(place, chat_ids(self.tokenizer, chat, longest))
        tokens, written = self._tokens, self.graph.nodes[place.parent].ids
        messages = [template_form(message) for message in chat.messages[place.known :]]
        ids = await tokens.following(messages, written, chat.chat_template_kwargs)
        prefix = forced_prefix(chat, self.tokenizer.tool_format)
        return [*ids, *(self.tokenizer.encode(prefix, add_special_tokens=False) if prefix else [])]

    def _most_tokens(self, prompts: Sequence[Placed], asked: int | None) -> int:
        """Tokens that each choice may have by the limits. Raises INVALID_REQUEST when there is no room for one."""
        limits, params = self.episode.limits, self.episode.request.sampling_params
        room = min(asked or params.max_tokens, params.max_tokens)
        for place, _, new, ids in prompts:
            begun = len(new) if place.parent is None else len(self.graph.path(place.parent)[0].ids)
            behind = len(ids) - begun
            room = min(room, limits.max_response_length - behind)
            if room < 1:
                bound = f"a conversation of at most {limits.max_response_length} tokens behind its prompt"
                raise self._reached(StopReason.MAX_RESPONSE, f"{bound} (limits.max_response_length), got {behind}")
        return room

    async def _reserved(self, call: CallInProgress, most: int, choices: int) -> int:
        """Tokens that each choice may have, reserved until the call ends. Waits for what other calls hold.

        Raises INVALID_REQUEST when none is left, or the client has left. TimeoutError when a stream needs a keep-alive.
        """
        while self._budget.must_wait(most, choices) and not self.ended.is_set():
            async with asyncio.timeout(KEEP_ALIVE_S if call.stream else None):
                await while_connected(call.request, self._budget.freed(most, choices, self.ended))
        if self.ended.is_set():
            raise self._after_end()
        room = self._budget.reserve(most, choices)
        call.reserved = room * choices
        if room < 1:
            bound = f"at most {self._bounds.max_tokens} tokens of the model (bounds.max_tokens)"
            raise self._reached(StopReason.MAX_RESPONSE, bound)
        return room

    def _forced_chat(self, chat: ChatRequest) -> ChatRequest:
        """The call with the run's sampling and the service's template variables."""
        template = self._tokens.template_kwargs
        own = {
            "messages": joined_turns(chat.messages),
            "chat_template_kwargs": {**template, **chat.chat_template_kwargs},
        }
        return chat.model_copy(update={**self._sampling(chat), **own})

    def _forced(self, asked: CompletionRequest) -> CompletionRequest:
        """The call with the run's sampling."""
        return asked.model_copy(update=self._sampling(asked))

    def _sampling(self, asked: SampledRequest) -> dict[str, object]:
        """The run's sampling. The call may name further stop tokens."""
        params = self.episode.request.sampling_params
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": sorted({*params.stop_token_ids, *asked.stop_token_ids}),
            "min_weight_version": self.episode.request.min_weight_version,
        }

    def _number(self) -> int:
        self.graph.calls += 1
        return self.graph.calls - 1

    def _reached(self, limit: StopReason, bound: str) -> TrackwayError:
        refused = self._over(f"expected {bound}")
        if self.limit is None:
            self.limit, self.refused = limit, refused
        return refused

    def _after_end(self) -> TrackwayError:
        why = _GAVE_WAY if self.gave_way else "by /end, with its agent, or by limits.timeout_s"
        return TrackwayError(ErrorCode.INVALID_REQUEST, f"the session has ended ({why}); open another one")

    def _over(self, why: str) -> TrackwayError:
        return TrackwayError(ErrorCode.INVALID_REQUEST, f"{why}; end the agent, or raise the session's bounds")

    async def generate(
        self,
        request: GenerateRequest,
        shown: int,
        caller: trace.SpanContext,
        asked: SampledRequest,
        told: Callable[[GeneratePiece], None] | None = None,
        enough: asyncio.Event | None = None,
    ) -> GenerateReply:
        """One generation, in a task of its own in the session's context; closing the session cancels the task.

        `told` gets the tokens as they come. A cancellation after `enough` was set is the normal end of it.
        """
        task = asyncio.current_task()
        assert task is not None
        self._generating.add(task)
        try:
            return await self._generated(request, shown, caller, asked, told, enough)
        except TrackwayError as error:
            self.failed = error
            raise
        except asyncio.CancelledError:
            if self.ended.is_set():
                raise self._over("the session ended during the call") from None
            raise
        finally:
            self._generating.discard(task)

    async def _generated(
        self,
        request: GenerateRequest,
        shown: int,
        caller: trace.SpanContext,
        asked: SampledRequest,
        told: Callable[[GeneratePiece], None] | None,
        enough: asyncio.Event | None,
    ) -> GenerateReply:
        chosen = request.sampling_params
        params = self.episode.request.sampling_params.model_copy(
            update={name: getattr(chosen, name) for name in _OF_THE_CALL}
        )
        turn = next(self._turns)
        part = TurnEpisode.of(self.episode, turn, request.token_ids, params)
        part.shown = shown
        arrived = 0

        def counted(piece: GeneratePiece) -> None:
            nonlocal arrived
            arrived += len(piece.token_ids)
            if told is not None:
                told(piece)

        with self._below(caller), turn_span(turn) as span:
            if turn and not shown:  # the agent shortened its conversation, or began another
                span.set(COMPACTED, True)
            span.stop_sequences(asked.stop)
            if isinstance(asked, ChatRequest) and asked.tools != self._offered:
                self._offered = asked.tools
                set_tools(asked.tools)
            try:
                reason = await self._generate(part, None if told is None else counted)
            except asyncio.CancelledError:
                if enough is None or not enough.is_set():
                    raise
                reason = "stop"
            finally:
                arrived = max(arrived, len(part.response_ids))
                self._budget.written(arrived)
            span.usage(len(part.prompt_ids), arrived)
            span.weight_versions(part.weight_versions)
            guided = {} if params.structured_outputs is None else {"guided": True}
            span.outputs({"finish_reason": reason, "calls": self.graph.calls, **guided, **self.attributes})
        return _reply(request, part, reason)

    def _below(self, caller: trace.SpanContext) -> AbstractContextManager[object]:
        """The caller's own span as the parent, if it is of the session's trace; else the root."""
        if caller.is_valid and caller.trace_id == self._root.trace_id:
            return trace.use_span(trace.NonRecordingSpan(caller), end_on_exit=False)
        return nullcontext()


class SessionModel:
    """The model of a session, as model_api generates with it, in tasks of the session's context.

    `shown` prompt tokens were shown before. `caller` is the span of the call. `asked` is its body.
    """

    def __init__(self, session: Session, shown: int, caller: trace.Span, asked: SampledRequest) -> None:
        self._session = session
        self._asked = asked
        self._shown = shown
        self._caller = caller.get_span_context()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The whole continuation."""
        return await self._session.generate(request, self._shown, self._caller, self._asked)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratePiece]:
        """The tokens as they come. Closing the iterator ends the generation, as a stop string does."""
        pieces: asyncio.Queue[GeneratePiece | None] = asyncio.Queue()
        enough = asyncio.Event()
        generating = asyncio.create_task(
            self._session.generate(request, self._shown, self._caller, self._asked, pieces.put_nowait, enough)
        )
        generating.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            [choice] = (await generating).choices
            yield GeneratePiece(finish_reason=choice.finish_reason)
        except GeneratorExit:
            enough.set()
            raise
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)


def _reply(request: GenerateRequest, part: TurnEpisode, reason: str) -> GenerateReply:
    choice = part.last_answer
    if choice is None or choice.finish_reason != reason or choice.token_ids != part.response_ids:
        choice = GenerateChoice.model_validate(
            {
                "finish_reason": reason,
                "token_ids": part.response_ids,
                "logprobs": choice_logprobs(part.response_ids, part.response_logprobs, part.top_logprobs),
                "weight_versions": part.weight_versions,
            }
        )
    prompt, written = len(part.prompt_ids), len(part.response_ids)
    usage = Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)
    return GenerateReply(request_id=request.request_id or "", model="", created=0, usage=usage, choices=[choice])


async def _result(answered: "asyncio.Future[Recorded | None]") -> Recorded | None:
    return await asyncio.shield(answered)


def _sampled(delta: Delta, guided: bool = False) -> Sampled:
    return Sampled(delta.token_ids, delta.logprobs, delta.spans, delta.finish_reason or "abort", guided)


def _echo(message: Message) -> ChatMessage:
    """The message as a client that changes nothing sends it back."""
    return ChatMessage(role="assistant", content=message.content, tool_calls=message.tool_calls or [])
