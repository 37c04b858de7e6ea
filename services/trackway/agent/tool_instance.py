"""A tool's state on the tool server: created at the first call, kept for later calls, always released.

A lost instance is recreated once and its earlier calls are replayed, except those that timed out and would do so
again. If the replay fails, or the new instance is lost too, the trajectory ends with that error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from trackway.agent.observations import CallFailed, faults_of_the_call
from trackway.clients import Deadline, ToolsClient
from trackway.tracing import add_incident
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, InstanceCreated, OneShotRequest, OneShotResult, ToolResult
from trackway.wire.tracing import Incident

R = TypeVar("R")

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
        whole = OneShotRequest.model_validate({**request.model_dump(), **kwargs})
        with faults_of_the_call():
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
        with faults_of_the_call():
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
