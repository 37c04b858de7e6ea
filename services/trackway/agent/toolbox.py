"""The tools of one trajectory: an instance each, made at the first call, kept for later ones, always given back.

What the model did wrong (bad arguments, a tool that raised) becomes an observation. What the infrastructure did wrong
is raised and ends the trajectory, so that it never reaches the context (verl puts both into it, verl #6978). A lost
instance is made anew once and its earlier calls are replayed; one instance runs one call at a time, so that its state
does not depend on timing.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import JsonValue

from trackway.agent.catalog import Offer
from trackway.agent.observations import Observation, failed_call, not_run, unknown_function
from trackway.chat.tool_calls import ParsedCall
from trackway.clients import Deadline, ToolsClient
from trackway.tracing import add_event, add_incident, token2text
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, InstanceCreated, OneShotRequest, ToolResult
from trackway.wire.tracing import Incident

logger = logging.getLogger("trackway.agent")

_TOLD_TO_THE_MODEL = {ErrorCode.INVALID_REQUEST, ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.TOOL_FAILED}
_LOST = {ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND}
"""A tool server that does not know an instance we never gave back has lost it."""

_releasing: set[asyncio.Task[None]] = set()
"""The event loop keeps only weak references to tasks; a release must outlive its cancelled trajectory."""


@dataclass
class _Instance:
    """One tool's state on the tool server."""

    tool: str
    created: asyncio.Task[InstanceCreated] | None = None
    history: list[ExecuteRequest] = field(default_factory=list)
    recreated: bool = False
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)


class Toolbox:
    """Runs the calls of one trajectory; every method but `release` raises TrackwayError."""

    def __init__(
        self, client: ToolsClient, sample: Sample, session_id: str, deadline: Deadline, release_timeout_s: float
    ) -> None:
        self._client = client
        self._sample = sample
        self._session_id = session_id
        self._deadline = deadline
        self._release_timeout_s = release_timeout_s
        self._instances: dict[str, _Instance] = {}

    async def answer(self, calls: Mapping[str, ParsedCall], offer: Offer, max_parallel_calls: int) -> list[Observation]:
        """Run the first `max_parallel_calls` of the calls (by id) side by side; observations keep their order."""
        answers = [
            self._answer(call, call_id, offer) if place < max_parallel_calls else _refuse(call, max_parallel_calls)
            for place, (call_id, call) in enumerate(calls.items())
        ]
        # All of them end before an error is raised: no call is left running behind a finished trajectory.
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise failures[0]
        return [outcome for outcome in outcomes if isinstance(outcome, Observation)]

    async def _answer(self, call: ParsedCall, call_id: str, offer: Offer) -> Observation:
        if call.error is not None:
            # The message quotes what the model wrote.
            add_event("malformed_call", tool=call.name, **({"message": call.error} if token2text() else {}))
            return Observation(call.error)
        if call.name not in offer.names:
            add_event("unknown_function", tool=call.name)
            return unknown_function(call.name, offer.names)
        run = self._run_once if call.name in offer.stateless else self._run_on_instance
        try:
            result = await run(call.name, call.arguments, call_id)
        except _CallFailed as failed:
            error = failed.error
            add_incident(failed.incident, tool=call.name, code=error.code.value, message=error.message)
            return failed_call(call.name, error.message)
        return Observation(result.text, result.reward, executed=True)

    async def _run_once(self, tool: str, arguments: dict[str, JsonValue], call_id: str) -> ToolResult:
        """One request instead of four, for a tool that keeps no state."""
        request = OneShotRequest(
            arguments=arguments,
            tool_call_id=call_id,
            execute_kwargs=self._sample.tool_kwargs(tool, "execute_kwargs"),
            create_kwargs=self._sample.tool_kwargs(tool, "create_kwargs"),
        )
        with _faults_of_the_call():
            return await self._client.one_shot(tool, request, self._call_deadline())

    async def _run_on_instance(self, tool: str, arguments: dict[str, JsonValue], call_id: str) -> ToolResult:
        execute_kwargs = self._sample.tool_kwargs(tool, "execute_kwargs")
        request = ExecuteRequest(arguments=arguments, tool_call_id=call_id, execute_kwargs=execute_kwargs)
        instance = self._instances.setdefault(tool, _Instance(tool))
        async with instance.one_at_a_time:
            try:
                return await self._execute_or_recover(instance, request)
            finally:
                instance.history.append(request)

    async def _execute_or_recover(self, instance: _Instance, request: ExecuteRequest) -> ToolResult:
        try:
            return await self._execute(instance, request)
        except TrackwayError as error:
            await self._recover(instance, error)
            return await self._execute(instance, request)

    async def _execute(self, instance: _Instance, request: ExecuteRequest) -> ToolResult:
        instance_id = await self._instance_id(instance)
        with _faults_of_the_call():
            return await self._client.execute(instance_id, request, self._session_id, self._call_deadline())

    async def _instance_id(self, instance: _Instance) -> str:
        if instance.created is None:
            kwargs = self._sample.tool_kwargs(instance.tool, "create_kwargs")
            creation = self._client.create(instance.tool, self._session_id, kwargs, self._call_deadline())
            instance.created = asyncio.create_task(creation)
        # A cancelled trajectory must still learn the id, or it could not give the instance back.
        return (await asyncio.shield(instance.created)).instance_id

    async def _recover(self, instance: _Instance, error: TrackwayError) -> None:
        """Make a lost instance anew and bring it to where the old one was; any other error goes on."""
        if error.code not in _LOST or instance.recreated:
            raise error
        replayed = len(instance.history)
        add_incident(Incident.INSTANCE_LOST, tool=instance.tool, code=error.code.value, replayed=replayed)
        instance.recreated = True
        instance.created = None
        for earlier in instance.history:
            try:
                await self._execute(instance, earlier)
            except _CallFailed:
                continue

    def _call_deadline(self) -> Deadline:
        return self._deadline.earlier(self._client.policy.total_s)

    async def rewards(self) -> dict[str, float]:
        """Each used tool's reward over the whole trajectory."""
        return {tool: await self._reward(instance) for tool, instance in self._instances.items()}

    async def _reward(self, instance: _Instance) -> float:
        try:
            return await self._client.reward(await self._instance_id(instance), self._session_id, self._call_deadline())
        except TrackwayError as error:
            await self._recover(instance, error)
            return await self._client.reward(await self._instance_id(instance), self._session_id, self._call_deadline())

    async def release(self) -> None:
        """Give every instance back, also when the trajectory is being cancelled; takes bounded time, never raises."""
        used = [instance for instance in self._instances.values() if instance.created is not None]
        if not used:
            return
        task = asyncio.create_task(self._release_all(used))
        _releasing.add(task)
        task.add_done_callback(_releasing.discard)
        await asyncio.shield(task)

    async def _release_all(self, instances: Sequence[_Instance]) -> None:
        deadline = Deadline.after(self._release_timeout_s)
        outcomes = await asyncio.gather(
            *(self._release(instance, deadline) for instance in instances), return_exceptions=True
        )
        for instance, outcome in zip(instances, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                logger.warning("%s: %s was not given back: %s", self._session_id, instance.tool, outcome)
                add_event("not_given_back", tool=instance.tool, reason=str(outcome))

    async def _release(self, instance: _Instance, deadline: Deadline) -> None:
        assert instance.created is not None
        try:
            async with asyncio.timeout(deadline.remaining):
                created = await instance.created
        except TrackwayError:
            return  # it was never made, and whoever asked for it was told
        try:
            await self._client.release(created.instance_id, self._session_id, deadline)
        except TrackwayError as error:
            if error.code not in _LOST:
                raise


class _CallFailed(Exception):
    """The tool answered that this call cannot be run; the model is told."""

    def __init__(self, error: TrackwayError) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def incident(self) -> Incident:
        """Too slow, or anything else."""
        too_slow = self.error.code is ErrorCode.DEADLINE_EXCEEDED
        return Incident.TOOL_TIMEOUT if too_slow else Incident.TOOL_FAILED


@contextmanager
def _faults_of_the_call() -> Iterator[None]:
    """Tell errors of the call itself from the others; a deadline that names the tool is that tool's own limit."""
    try:
        yield
    except TrackwayError as error:
        too_slow = error.code is ErrorCode.DEADLINE_EXCEEDED and "tool" in error.detail
        if too_slow or error.code in _TOLD_TO_THE_MODEL:
            raise _CallFailed(error) from error
        raise


async def _refuse(call: ParsedCall, max_parallel_calls: int) -> Observation:
    add_event("call_not_run", tool=call.name)
    return not_run(call.name, max_parallel_calls)
