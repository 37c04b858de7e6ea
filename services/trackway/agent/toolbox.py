"""The tools of a trajectory, chosen from the catalog: runs the calls of a turn concurrently, and makes observations.

Calls of the same stateful tool run in the order of the text. All others run concurrently.

A tool's state on the tool server is created at the first call, kept for later calls, and always released. A lost
instance is recreated once and its earlier calls are replayed, except those that timed out and would do so again. If the
replay fails, or the new instance is lost too, the trajectory ends with that error.

A fault of the call (bad arguments, a tool that raised or timed out) becomes an observation, with verl's texts and
truncation. A fault of the infrastructure is raised and ends the trajectory, so it never enters the context (verl adds
both, verl #6978). `trackway.wire.errors.ERRORS` says which is which.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import JsonValue

from trackway.agent.episode import waits_for
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tracing import add_event, add_incident, token2text
from trackway.wire.agent import GroupRequest, Limits, Sample
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, ModelSees, TrackwayError
from trackway.wire.tools import ExecuteRequest, InstanceCreated, OneShotRequest, OneShotResult, ToolList, ToolResult
from trackway.wire.trajectory import Incident, ToolCallRecord

CharSpan = tuple[int, int]
"""Start and end offset of a token's characters in a text."""

_MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}


class CallFailed(Exception):
    """The tool could not run this call. The message becomes an observation."""

    def __init__(self, error: TrackwayError) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def too_slow(self) -> bool:
        """Return whether the call exceeded the tool's time limit."""
        return self.error.code is ErrorCode.TOOL_TIMEOUT

    @property
    def incident(self) -> Incident:
        """The incident to record: a time-out or a tool error."""
        return Incident.TOOL_TIMEOUT if self.too_slow else Incident.TOOL_FAILED


@contextmanager
def _faults_of_the_call() -> Iterator[None]:
    """Raises CallFailed for errors of a call that the model may read, including a time-out of the tool."""
    try:
        yield
    except TrackwayError as error:
        if error.model_sees is ModelSees.YES:
            raise CallFailed(error) from error
        raise


@dataclass(frozen=True)
class Observation:
    """The result of one call and its step reward, or None for a call beyond the turn's limit."""

    text: str
    reward: float | None = 0.0
    record: ToolCallRecord | None = None
    """The record of the call, if it reached its tool."""


def unknown_function(name: str, available: Sequence[str]) -> Observation:
    """The observation for a tool that was not offered."""
    return Observation(f"Unknown function '{name}'. Available tools: {list(available)}")


def failed_call(record: ToolCallRecord, message: str) -> Observation:
    """The observation for a call that the tool rejected or that raised."""
    return Observation(f"Error executing tool '{record.tool}': {message}", record=record)


def not_run(name: str, max_parallel_calls: int) -> Observation:
    """The observation for a call beyond the turn's `max_parallel_calls` (verl drops it silently)."""
    add_event("call_not_run", tool=name)
    text = f"The call of '{name}' was not run: at most {max_parallel_calls} tool call(s) run in one turn."
    return Observation(text, reward=None)


def truncated(text: str, limits: Limits, tokens: Sequence[CharSpan] = ()) -> str:
    """`text` truncated to its limits, with a marker on the truncated side.

    `tokens` are the character offsets of its tokens, required when `max_tool_response_tokens` is set.
    """
    side = limits.tool_response_truncate_side
    kept = [_kept_characters(len(text), side, limits.max_tool_response_length)]
    if limits.max_tool_response_tokens is not None:
        kept.append(_kept_tokens(len(text), side, limits.max_tool_response_tokens, tokens))
    start, end = min(head for head, _ in kept), min(tail for _, tail in kept)
    if max(start, end) >= len(text):
        return text
    return f"{text[:start]}{_MARKERS[side]}{text[len(text) - end :]}"


def _kept_characters(length: int, side: str, bound: int | None) -> tuple[int, int]:
    """Characters kept at the start and at the end. Both equal the length when nothing is truncated."""
    return (length, length) if bound is None or length <= bound else _shares(side, bound)


def _kept_tokens(length: int, side: str, bound: int, tokens: Sequence[CharSpan]) -> tuple[int, int]:
    """The same for a limit in tokens. A character that is only partly kept is dropped."""
    if len(tokens) <= bound:
        return length, length
    head, tail = _shares(side, bound)
    start = min(tokens[head - 1][1], tokens[head][0]) if head else 0
    end = length - tokens[-tail - 1][1] if tail else 0
    return start, end


def _shares(side: str, bound: int) -> tuple[int, int]:
    shares = {"left": (0, bound), "right": (bound, 0), "middle": (bound // 2, bound // 2)}
    return shares[side]


@dataclass(frozen=True)
class ToolSet:
    """The tools that a trajectory may call."""

    schemas: list[ToolSchema]
    stateless: frozenset[str] = frozenset()
    """Names of the stateless tools, which need no instance."""

    @property
    def names(self) -> list[str]:
        """Names of the tools, in the order of the server or of the request."""
        return [schema.function.name for schema in self.schemas]


REFRESH_S = 30.0
"""Seconds for which the tool server's schemas are cached."""


class ToolCatalog:
    """The tool server's list. Trajectories that start together share a request."""

    def __init__(self, client: ToolsClient) -> None:
        self._client = client
        self._known_until = 0.0
        self._listing: asyncio.Task[ToolList] | None = None

    async def offered(self, request: GroupRequest) -> ToolSet:
        """The tools of this request: its `tools`, narrowed by the row's `extra_info.tool_selection` (as verl).

        Raises:
            TrackwayError: `unknown_tool` when one of them is not on the server; the client's errors.
        """
        listed = await self._list()
        known = {schema.function.name: schema for schema in listed.tools}
        wanted = list(known) if request.tools is None else request.tools
        selection = request.sample.extra_info.get("tool_selection")
        if isinstance(selection, list):
            wanted = [name for name in wanted if name in selection]
        missing = [name for name in wanted if name not in known]
        if missing:
            message = f"expected tools of the server ({sorted(known)}), got {missing}; add them to its configuration"
            raise TrackwayError(ErrorCode.UNKNOWN_TOOL, message)
        return ToolSet([known[name] for name in wanted], frozenset(listed.stateless))

    async def _list(self) -> ToolList:
        listing = self._listing
        if listing is None or (listing.done() and not self._fresh(listing)):
            listing = self._listing = asyncio.create_task(self._client.offer())
            self._known_until = time.monotonic() + REFRESH_S
        # Cancelling one trajectory must not cancel the request for the others.
        return await asyncio.shield(listing)

    def _fresh(self, listing: asyncio.Task[ToolList]) -> bool:
        failed = listing.cancelled() or listing.exception() is not None
        return not failed and time.monotonic() < self._known_until


R = TypeVar("R")

MESSAGE_CHARS = 1000
"""Characters of a call's error that its record keeps."""
_LOST = {ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND}
"""An unreleased instance that the tool server does not know is lost."""


@dataclass(frozen=True)
class ToolCallContext:
    """The trajectory's part of a tool request."""

    client: ToolsClient
    sample: Sample
    session_id: str
    deadline: Deadline

    @property
    def call_deadline(self) -> Deadline:
        """The deadline of a call that starts now."""
        return self.deadline.earlier(self.client.policy.total_s)

    async def one_shot(self, tool: str, request: ExecuteRequest) -> OneShotResult:
        """One request instead of four, for a stateless tool."""
        kwargs = {
            kind: self.sample.tool_kwargs(tool, kind)
            for kind in ("create_kwargs", "calc_reward_kwargs", "release_kwargs")
        }
        whole = OneShotRequest.model_validate({**request.model_dump(), **kwargs, "session_id": self.session_id})
        with _faults_of_the_call():
            return await self.client.one_shot(tool, whole, self.call_deadline)


class ToolInstance:
    """The instance of a tool that serves all calls of a trajectory."""

    done = False

    def __init__(self, tool: str, context: ToolCallContext) -> None:
        self.tool = tool
        self.call_lock = asyncio.Lock()
        """Held during each call, so that the state does not depend on timing."""
        self._context = context
        self._created: asyncio.Task[InstanceCreated] | None = None
        self._history: list[ExecuteRequest] = []
        self._recreated = False

    async def execute(self, request: ExecuteRequest) -> ToolResult:
        """Run one call. Raises CallFailed when the tool cannot run it, TrackwayError otherwise."""
        try:
            result = await self._recovering(lambda: self._execute(request))
        except CallFailed as failed:
            if not failed.too_slow:
                self._history.append(request)
            raise
        self._history.append(request)
        return result

    async def reward(self) -> float:
        """The tool's reward over the whole trajectory."""
        return await self._recovering(self._reward)

    async def release(self, deadline: Deadline) -> None:
        """Release the instance, if it was created."""
        if self._created is None:
            return
        try:
            async with asyncio.timeout(deadline.remaining):
                created = await self._created
        except TrackwayError:
            return  # it was not created, and the call that tried has the error
        client, session_id = self._context.client, self._context.session_id
        kwargs = self._context.sample.tool_kwargs(self.tool, "release_kwargs")
        try:
            await client.release(created.instance_id, session_id, deadline, kwargs)
        except TrackwayError as error:
            if error.code not in _LOST:
                raise

    async def _execute(self, request: ExecuteRequest) -> ToolResult:
        context, instance_id = self._context, await self._instance_id()
        with _faults_of_the_call():
            return await context.client.execute(instance_id, request, context.session_id, context.call_deadline)

    async def _reward(self) -> float:
        context, instance_id = self._context, await self._instance_id()
        kwargs = context.sample.tool_kwargs(self.tool, "calc_reward_kwargs")
        return await context.client.reward(instance_id, context.session_id, context.call_deadline, kwargs)

    async def _instance_id(self) -> str:
        if self._created is None:
            context, kwargs = self._context, self._context.sample.tool_kwargs(self.tool, "create_kwargs")
            creation = context.client.create(self.tool, context.session_id, kwargs, context.call_deadline)
            self._created = asyncio.create_task(creation)
        # A cancelled trajectory still needs the id, to release the instance.
        return (await asyncio.shield(self._created)).instance_id

    async def _recovering(self, work: Callable[[], Awaitable[R]]) -> R:
        try:
            return await work()
        except TrackwayError as error:
            if error.code not in _LOST or self._recreated:
                raise
            await self._recreate(error)
            return await work()

    async def _recreate(self, error: TrackwayError) -> None:
        """Replay the earlier calls on a new instance."""
        replayed = len(self._history)
        add_incident(Incident.INSTANCE_LOST, tool=self.tool, code=error.code.value, replayed=replayed)
        self._recreated = True
        self._created = None
        for earlier in self._history:
            with suppress(CallFailed):
                await self._execute(earlier)


logger = logging.getLogger("trackway.agent")

_releasing: set[asyncio.Task[None]] = set()
"""The event loop keeps only weak references to tasks. A release must survive its cancelled trajectory."""


class StatefulTool(Protocol):
    """Instance that answers all calls of a tool in a trajectory."""

    call_lock: asyncio.Lock
    """Held during each call."""

    @property
    def tool(self) -> str:
        """Its name."""
        ...

    @property
    def done(self) -> bool:
        """Return whether a call has ended the trajectory."""
        ...

    async def execute(self, request: ExecuteRequest) -> ToolResult:
        """Run one call. Raises CallFailed when the tool cannot run it, TrackwayError otherwise."""
        ...

    async def reward(self) -> float:
        """The tool's reward over the whole trajectory."""
        ...

    async def release(self, deadline: Deadline) -> None:
        """Give back what it holds."""
        ...


class Toolbox:
    """Runs the calls of one trajectory. Every method but `release` raises TrackwayError."""

    def __init__(
        self, client: ToolsClient, sample: Sample, session_id: str, deadline: Deadline, release_timeout_s: float
    ) -> None:
        self.records: list[ToolCallRecord] = []
        """Every call sent to a tool, in the order of the text, including calls of a failed turn."""
        self._context = ToolCallContext(client, sample, session_id, deadline)
        self._release_timeout_s = release_timeout_s
        self._instances: dict[str, StatefulTool] = {}
        self._one_shot_rewards: dict[str, list[float]] = defaultdict(list)
        """Rewards of one-shot calls by tool."""

    def add(self, tool: StatefulTool) -> None:
        """Have this object answer the tool's calls, instead of an instance on the tool server."""
        self._instances[tool.tool] = tool

    @property
    def done(self) -> bool:
        """Return whether a call has ended the trajectory."""
        return any(tool.done for tool in self._instances.values())

    async def answer(
        self, calls: Mapping[str, ParsedCall], tools: ToolSet, max_parallel_calls: int
    ) -> list[Observation]:
        """Run the first `max_parallel_calls` of the calls (by id) concurrently. Observations keep their order.

        An infrastructure error cancels the other calls, so that a slow call does not delay the end.
        """
        sent: dict[str, ToolCallRecord] = {}
        try:
            async with asyncio.TaskGroup() as side_by_side:
                answers = [
                    side_by_side.create_task(self._answer(call, call_id, tools, sent))
                    for call_id, call in list(calls.items())[:max_parallel_calls]
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.records += [sent[call_id] for call_id in calls if call_id in sent]
        refused = [not_run(call.name, max_parallel_calls) for call in list(calls.values())[max_parallel_calls:]]
        return [*(answer.result() for answer in answers), *refused]

    async def _answer(
        self, call: ParsedCall, call_id: str, tools: ToolSet, sent: dict[str, ToolCallRecord]
    ) -> Observation:
        rejection = rejected(call, tools)
        if rejection is not None:
            return rejection
        instance = None
        if call.name not in tools.stateless:
            instance = self._instances.setdefault(call.name, ToolInstance(call.name, self._context))
        try:
            async with nullcontext() if instance is None else instance.call_lock:
                with self._recorded(call.name, call_id, sent) as record:
                    result = await self._run(instance, call, call_id)
                    record.reward, record.metrics = result.reward, result.metrics
        except CallFailed as failed:
            error = failed.error
            place = error.detail.get("raised_at")
            message = error.message[:MESSAGE_CHARS] + (f" ({place})" if place else "")
            add_incident(failed.incident, tool=call.name, code=error.code.value, message=message)
            sent[call_id].message = message
            return failed_call(sent[call_id], error.message)
        return Observation(result.text, result.reward, record)

    async def _run(self, instance: StatefulTool | None, call: ParsedCall, call_id: str) -> ToolResult:
        kwargs = self._context.sample.tool_kwargs(call.name, "execute_kwargs")
        request = ExecuteRequest(arguments=call.arguments, tool_call_id=call_id, execute_kwargs=kwargs)
        if instance is not None:
            return await instance.execute(request)
        result = await self._context.one_shot(call.name, request)
        self._one_shot_rewards[call.name].append(result.instance_reward)
        return result

    @contextmanager
    def _recorded(self, tool: str, call_id: str, sent: dict[str, ToolCallRecord]) -> Iterator[ToolCallRecord]:
        """Record a call. A call cancelled before the trajectory's deadline leaves no record."""
        record = sent[call_id] = ToolCallRecord(tool=tool, tool_call_id=call_id)
        started = time.perf_counter()
        try:
            with waits_for(f"tool {tool}", self._context.call_deadline):
                yield record
        except asyncio.CancelledError:
            if self._context.deadline.expired:  # the client's deadline or the trajectory's may come first
                record.error = ErrorCode.DEADLINE_EXCEEDED
            else:
                del sent[call_id]
            raise
        except Exception as error:
            record.error = _code_of(error)
            raise
        finally:
            record.seconds = time.perf_counter() - started

    async def rewards(self) -> dict[str, float]:
        """Each used tool's reward over the trajectory. For a stateless tool, the sum over its calls."""
        summed = {tool: math.fsum(rewards) for tool, rewards in self._one_shot_rewards.items()}
        return summed | {tool: await instance.reward() for tool, instance in self._instances.items()}

    async def release(self) -> None:
        """Release every instance, even when the trajectory is cancelled. Bounded in time, never raises."""
        if not self._instances:
            return
        task = asyncio.create_task(self._release_all())
        _releasing.add(task)
        task.add_done_callback(_releasing.discard)
        await asyncio.shield(task)

    async def _release_all(self) -> None:
        deadline, instances = Deadline.after(self._release_timeout_s), self._instances.values()
        outcomes = await asyncio.gather(*(instance.release(deadline) for instance in instances), return_exceptions=True)
        for instance, outcome in zip(instances, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("%s: %s was not released: %s", self._context.session_id, instance.tool, outcome)
                add_event("not_given_back", tool=instance.tool, reason=str(outcome))


def rejected(call: ParsedCall, tools: ToolSet) -> Observation | None:
    """The observation for a call that cannot be sent to a tool, or None if it can be sent."""
    if call.error is not None:
        # The message quotes the model's text.
        add_event("malformed_call", tool=call.name, **({"message": call.error} if token2text() else {}))
        return Observation(call.error)
    if call.name not in tools.names:
        add_event("unknown_function", tool=call.name)
        return unknown_function(call.name, tools.names)
    return None


def tool_facts(records: Sequence[ToolCallRecord], rewards: Mapping[str, float]) -> dict[str, JsonValue]:
    """The tools' part of a scoring request, in addition to verl's `tool_rewards`. See ScoreRequest for the keys."""
    sums: dict[str, dict[str, float]] = {record.tool: {} for record in records}
    for record in records:
        so_far = sums[record.tool]
        so_far |= {key: so_far.get(key, 0.0) + value for key, value in record.metrics.items()}
    calls: list[JsonValue] = [record.model_dump(mode="json") for record in records]
    metrics: dict[str, JsonValue] = {tool: {**measured} for tool, measured in sums.items()}
    return {"tool_calls": calls, "tool_metrics": metrics, "tool_calc_rewards": {**rewards}}


def _code_of(error: Exception) -> ErrorCode:
    failure = error.error if isinstance(error, CallFailed) else error
    return failure.code if isinstance(failure, TrackwayError) else ErrorCode.INTERNAL
