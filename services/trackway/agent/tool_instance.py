"""One tool's state on the tool server: made at the first call, kept for later ones, always given back.

A lost instance is made anew once and its earlier calls are replayed, but for those that were cut off as too slow: they
would be again. When the replay fails, or the new instance is lost too, the trajectory ends with that error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from trackway.agent.call_faults import CallFailed, faults_of_the_call
from trackway.clients import Deadline, ToolsClient
from trackway.tracing import add_incident
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, InstanceCreated, OneShotRequest, ToolResult
from trackway.wire.tracing import Incident

R = TypeVar("R")

_LOST = {ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND}
"""A tool server that does not know an instance we never gave back has lost it."""


@dataclass(frozen=True)
class ToolCallContext:
    """The trajectory that calls: what its requests to the tool server have in common."""

    client: ToolsClient
    sample: Sample
    session_id: str
    deadline: Deadline

    @property
    def call_deadline(self) -> Deadline:
        """The end of a call that begins now."""
        return self.deadline.earlier(self.client.policy.total_s)

    async def one_shot(self, tool: str, request: ExecuteRequest) -> ToolResult:
        """One request instead of four, for a tool that keeps no state."""
        kwargs = {
            kind: self.sample.tool_kwargs(tool, kind)
            for kind in ("create_kwargs", "calc_reward_kwargs", "release_kwargs")
        }
        whole = OneShotRequest.model_validate({**request.model_dump(), **kwargs})
        with faults_of_the_call():
            return await self.client.one_shot(tool, whole, self.call_deadline)


class ToolInstance:
    """The instance of one tool that serves all calls of a trajectory."""

    def __init__(self, tool: str, caller: ToolCallContext) -> None:
        self.tool = tool
        self.one_at_a_time = asyncio.Lock()
        """To be held around each call, so that the state does not depend on timing."""
        self._caller = caller
        self._created: asyncio.Task[InstanceCreated] | None = None
        self._history: list[ExecuteRequest] = []
        self._recreated = False

    async def execute(self, request: ExecuteRequest) -> ToolResult:
        """One call. CallFailed when the tool cannot run it, TrackwayError for everything else."""
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
        """Give it back, if it was made."""
        if self._created is None:
            return
        try:
            async with asyncio.timeout(deadline.remaining):
                created = await self._created
        except TrackwayError:
            return  # it was never made, and whoever asked for it was told
        client, session_id = self._caller.client, self._caller.session_id
        kwargs = self._caller.sample.tool_kwargs(self.tool, "release_kwargs")
        try:
            await client.release(created.instance_id, session_id, deadline, kwargs)
        except TrackwayError as error:
            if error.code not in _LOST:
                raise

    async def _execute(self, request: ExecuteRequest) -> ToolResult:
        caller, instance_id = self._caller, await self._instance_id()
        with faults_of_the_call():
            return await caller.client.execute(instance_id, request, caller.session_id, caller.call_deadline)

    async def _reward(self) -> float:
        caller, instance_id = self._caller, await self._instance_id()
        kwargs = caller.sample.tool_kwargs(self.tool, "calc_reward_kwargs")
        return await caller.client.reward(instance_id, caller.session_id, caller.call_deadline, kwargs)

    async def _instance_id(self) -> str:
        if self._created is None:
            caller, kwargs = self._caller, self._caller.sample.tool_kwargs(self.tool, "create_kwargs")
            creation = caller.client.create(self.tool, caller.session_id, kwargs, caller.call_deadline)
            self._created = asyncio.create_task(creation)
        # A cancelled trajectory must still learn the id, or it could not give the instance back.
        return (await asyncio.shield(self._created)).instance_id

    async def _recovering(self, work: Callable[[], Awaitable[R]]) -> R:
        try:
            return await work()
        except TrackwayError as error:
            if error.code not in _LOST or self._recreated:
                raise
            await self._make_anew(error)
            return await work()

    async def _make_anew(self, error: TrackwayError) -> None:
        """Bring a new instance to where the lost one was."""
        replayed = len(self._history)
        add_incident(Incident.INSTANCE_LOST, tool=self.tool, code=error.code.value, replayed=replayed)
        self._recreated = True
        self._created = None
        for earlier in self._history:
            with suppress(CallFailed):
                await self._execute(earlier)
