"""The tool server without HTTP: tools, their instances, and the way of one call through both."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from trackway.tools.base import BaseTool, ToolLimits
from trackway.tools.guard import GuardedTool
from trackway.tools.instances import Instance, InstanceTable
from trackway.tools.registry import ToolRegistry
from trackway.tracing import SpanHandle, tool_span
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import TrackwayError
from trackway.wire.tools import (
    CreateInstance,
    ExecuteRequest,
    InstanceCreated,
    OneShotRequest,
    ToolResult,
)

logger = logging.getLogger("trackway.tools")


class ToolServer:
    """Creates, executes, rewards and releases; every method raises TrackwayError."""

    def __init__(self, tools: Sequence[BaseTool], limits: ToolLimits, instances: InstanceTable) -> None:
        self._registry = ToolRegistry(tools)
        self._guarded = {tool.name: GuardedTool(tool, limits) for tool in tools}
        self._instances = instances
        self._started: list[BaseTool] = []

    async def start(self) -> None:
        """Let every tool get ready; those that began are closed when one cannot."""
        try:
            for guard in self._guarded.values():
                self._started.append(guard.tool)
                await guard.tool.start()
        except BaseException:
            await self.close()
            raise

    def schemas(self) -> list[ToolSchema]:
        """Every tool as the model sees it."""
        return self._registry.schemas()

    def stateless(self) -> list[str]:
        """Names of the tools whose calls need no instance."""
        return self._registry.stateless()

    async def create(self, request: CreateInstance) -> InstanceCreated:
        """Make one tool's state for one trajectory."""
        tool = self._registry.get(request.tool)
        if self._instances.full:
            await self.reap()
        instance = self._instances.add(tool, request.session_id)
        try:
            await self._guard(instance).create(instance.id, request.create_kwargs)
        except BaseException:
            self._instances.strike(instance)
            raise
        self._instances.created(instance)
        return InstanceCreated(instance_id=instance.id, tool=tool.name)

    async def execute(self, instance_id: str, request: ExecuteRequest) -> ToolResult:
        """One call, as one span."""
        instance = self._instances.get(instance_id)
        with tool_span(instance.tool.name, request.arguments, request.tool_call_id) as span:
            result = await self._execute(instance, request)
            _show(span, result)
        return result

    async def _execute(self, instance: Instance, request: ExecuteRequest) -> ToolResult:
        guard = self._guard(instance)
        async with self._instances.held(instance, guard.limits.wait_timeout_s):
            return await guard.execute(instance.id, request)

    async def reward(self, instance_id: str) -> float:
        """The reward of an instance over its whole life."""
        instance = self._instances.get(instance_id)
        guard = self._guard(instance)
        async with self._instances.held(instance, guard.limits.wait_timeout_s):
            return await guard.reward(instance_id)

    async def release(self, instance_id: str) -> None:
        """Forget an instance; it is gone even when the tool fails to let go."""
        await self._release(self._instances.get(instance_id))

    async def one_shot(self, tool: str, request: OneShotRequest) -> ToolResult:
        """Create, execute, reward and release, as one span; the life's reward comes as the metric `instance_reward`."""
        self._registry.get(tool)
        with tool_span(tool, request.arguments, request.tool_call_id) as span:
            result = await self._whole_life(tool, request)
            _show(span, result)
        return result

    async def _whole_life(self, tool: str, request: OneShotRequest) -> ToolResult:
        made = await self.create(CreateInstance(tool=tool, create_kwargs=request.create_kwargs))
        instance = self._instances.get(made.instance_id)
        try:
            result = await self._execute(instance, request)
            metrics = {**result.metrics, "instance_reward": await self.reward(instance.id)}
        finally:
            await self._quietly(self._release(instance), instance)
        return result.model_copy(update={"metrics": metrics})

    async def reap(self) -> int:
        """Release the instances whose idle limit passed; how many they were."""
        expired = self._instances.take_expired()
        for instance in expired:
            logger.warning("instance %s (%s) of %r expired", instance.id, instance.session_id, instance.tool.name)
        forgets = (self._quietly(self._guard(one).release(one.id), one) for one in expired)
        await asyncio.gather(*forgets)
        return len(expired)

    async def close(self) -> None:
        """Release everything and close the tools: the process ends."""
        living = self._instances.everything()
        await asyncio.gather(*(self._quietly(self._release(one), one) for one in living))
        while self._started:
            tool = self._started.pop()
            try:
                await tool.close()
            except Exception:
                logger.exception("tool %r did not close cleanly", tool.name)

    async def _release(self, instance: Instance) -> None:
        guard = self._guard(instance)
        await self._instances.retire(instance, guard.limits.wait_timeout_s)
        await guard.release(instance.id)

    async def _quietly(self, release: Awaitable[None], instance: Instance) -> None:
        """For releases of which nobody waits to hear a failure, or another error is already on its way."""
        try:
            await release
        except TrackwayError as error:
            logger.warning("instance %s was not released cleanly: %s", instance.id, error.message)

    def _guard(self, instance: Instance) -> GuardedTool:
        return self._guarded[instance.tool.name]


def _show(span: SpanHandle, result: ToolResult) -> None:
    span.outputs({"text": result.text, "reward": result.reward})
