"""The tools of one trajectory: the calls of a turn side by side, the instances behind them, and what each call left.

Calls of one stateful tool run one after another in the order of the text; all others at the same time.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext

from pydantic import JsonValue

from trackway.agent.call_faults import CallFailed
from trackway.agent.catalog import ToolSet
from trackway.agent.observations import Observation, failed_call, not_run, unknown_function
from trackway.agent.tool_instance import ToolCallContext, ToolInstance
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tracing import add_event, add_incident, token2text
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, ToolResult
from trackway.wire.trajectory import ToolCallRecord

logger = logging.getLogger("trackway.agent")

INSTANCE_REWARD = "instance_reward"
"""Under this metric a one-shot call brings the reward of its instance."""

_releasing: set[asyncio.Task[None]] = set()
"""The event loop keeps only weak references to tasks; a release must outlive its cancelled trajectory."""


class Toolbox:
    """Runs the calls of one trajectory; every method but `release` raises TrackwayError."""

    def __init__(
        self, client: ToolsClient, sample: Sample, session_id: str, deadline: Deadline, release_timeout_s: float
    ) -> None:
        self.records: list[ToolCallRecord] = []
        """Every call that was sent to its tool, in the order of the text; also of a turn that failed."""
        self._caller = ToolCallContext(client, sample, session_id, deadline)
        self._release_timeout_s = release_timeout_s
        self._instances: dict[str, ToolInstance] = {}
        self._lives: dict[str, list[float]] = defaultdict(list)
        """Rewards of the calls that were a whole life each."""

    async def answer(
        self, calls: Mapping[str, ParsedCall], offer: ToolSet, max_parallel_calls: int
    ) -> list[Observation]:
        """Run the first `max_parallel_calls` of the calls (by id) side by side; observations keep their order.

        When one fails by the infrastructure the others are cut off, so that a slow one does not hold up the end.
        """
        sent: dict[str, ToolCallRecord] = {}
        try:
            async with asyncio.TaskGroup() as side_by_side:
                answers = [
                    side_by_side.create_task(self._answer(call, call_id, offer, sent))
                    for call_id, call in list(calls.items())[:max_parallel_calls]
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.records += [sent[call_id] for call_id in calls if call_id in sent]
        refused = [_refuse(call, max_parallel_calls) for call in list(calls.values())[max_parallel_calls:]]
        return [*(answer.result() for answer in answers), *refused]

    async def _answer(
        self, call: ParsedCall, call_id: str, offer: ToolSet, sent: dict[str, ToolCallRecord]
    ) -> Observation:
        told = rejected(call, offer)
        if told is not None:
            return told
        instance = None
        if call.name not in offer.stateless:
            instance = self._instances.setdefault(call.name, ToolInstance(call.name, self._caller))
        try:
            async with _alone(instance):
                with self._recorded(call.name, call_id, sent) as record:
                    result = await self._run(instance, call, call_id)
                    record.reward, record.metrics = result.reward, result.metrics
        except CallFailed as failed:
            error = failed.error
            add_incident(failed.incident, tool=call.name, code=error.code.value, message=error.message)
            return failed_call(sent[call_id], error.message)
        return Observation(result.text, result.reward, record)

    async def _run(self, instance: ToolInstance | None, call: ParsedCall, call_id: str) -> ToolResult:
        kwargs = self._caller.sample.tool_kwargs(call.name, "execute_kwargs")
        request = ExecuteRequest(arguments=call.arguments, tool_call_id=call_id, execute_kwargs=kwargs)
        if instance is not None:
            return await instance.execute(request)
        result = await self._caller.one_shot(call.name, request)
        self._lives[call.name].append(result.metrics.pop(INSTANCE_REWARD, 0.0))
        return result

    @contextmanager
    def _recorded(self, tool: str, call_id: str, sent: dict[str, ToolCallRecord]) -> Iterator[ToolCallRecord]:
        """What becomes of a call that is sent now; nothing when it is cut off before the trajectory's deadline."""
        record = sent[call_id] = ToolCallRecord(tool=tool, tool_call_id=call_id)
        started = time.perf_counter()
        try:
            yield record
        except asyncio.CancelledError:
            if self._caller.deadline.expired:  # of the client and the trajectory, either may be first to say so
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
        """Each used tool's reward over the whole trajectory; of one without state, the sum over its calls."""
        summed = {tool: math.fsum(rewards) for tool, rewards in self._lives.items()}
        return summed | {tool: await instance.reward() for tool, instance in self._instances.items()}

    async def release(self) -> None:
        """Release every instance, also when the trajectory is cancelled; takes bounded time and never raises."""
        if not self._instances:
            return
        task = asyncio.create_task(self._release_all())
        _releasing.add(task)
        task.add_done_callback(_releasing.discard)
        await asyncio.shield(task)

    async def _release_all(self) -> None:
        deadline, instances = Deadline.after(self._release_timeout_s), self._instances.values()
        outcomes = await asyncio.gather(*(one.release(deadline) for one in instances), return_exceptions=True)
        for instance, outcome in zip(instances, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("%s: %s was not given back: %s", self._caller.session_id, instance.tool, outcome)
                add_event("not_given_back", tool=instance.tool, reason=str(outcome))


def rejected(call: ParsedCall, offer: ToolSet) -> Observation | None:
    """What the model is told about a call that cannot be sent to any tool; None for one that can."""
    if call.error is not None:
        # The message quotes what the model wrote.
        add_event("malformed_call", tool=call.name, **({"message": call.error} if token2text() else {}))
        return Observation(call.error)
    if call.name not in offer.names:
        add_event("unknown_function", tool=call.name)
        return unknown_function(call.name, offer.names)
    return None


def tool_facts(records: Sequence[ToolCallRecord], rewards: Mapping[str, float]) -> dict[str, JsonValue]:
    """What a scorer learns of the tools, beside verl's `tool_rewards`; ScoreRequest says what each key holds."""
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


def _alone(instance: ToolInstance | None) -> AbstractAsyncContextManager[None]:
    return nullcontext() if instance is None else instance.one_at_a_time


def _refuse(call: ParsedCall, max_parallel_calls: int) -> Observation:
    add_event("call_not_run", tool=call.name)
    return not_run(call.name, max_parallel_calls)
