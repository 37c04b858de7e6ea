"""The tool server without HTTP: its tools by name, their instances and calls, and the instances of named sessions."""

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client import Counter, Gauge
from pydantic import JsonValue

from trackway.serving.metrics import Collectors, OperationDuration
from trackway.serving.user_code import run_user_code
from trackway.tools.base import BaseTool, ToolLimits, ToolSource, session_scope
from trackway.tools.core.instances import Event, Instance, InstanceTable
from trackway.tools.core.limits import LimitedTool
from trackway.tracing import SpanHandle, tool_span
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import (
    CreateInstance,
    ExecuteRequest,
    InstanceCreated,
    InstanceList,
    OneShotRequest,
    OneShotResult,
    SessionReleased,
    ToolResult,
)
from trackway.wire.trajectory import run_of

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
"""OpenAI's rule for function names. Such a name also needs no escaping in a URL path."""


class ToolRegistry:
    """Tools by name. ValueError for a duplicate or invalid name."""

    def __init__(self, tools: Iterable[BaseTool] = ()) -> None:
        self._tools: dict[str, BaseTool] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: BaseTool) -> None:
        """One tool more."""
        if not _NAME.fullmatch(tool.name):
            raise ValueError(
                f"{tool.origin}: expected a name of 1 to 64 of A-Z a-z 0-9 _ -, got {tool.name!r}; rename it"
            )
        if (other := self._tools.get(tool.name)) is not None:
            raise ValueError(
                f"expected one tool of each name, got two named {tool.name!r}: "
                f"from {other.origin} and from {tool.origin}; rename one or leave it out"
            )
        self._tools[tool.name] = tool

    def get(self, name: str) -> BaseTool:
        """The tool of that name. UNKNOWN_TOOL lists the known ones."""
        tool = self._tools.get(name)
        if tool is None:
            known = sorted(self._tools)
            raise TrackwayError(
                ErrorCode.UNKNOWN_TOOL,
                f"expected one of the tools {', '.join(known)}, got {name!r}; GET /tools lists them with their schemas",
                known=[*known],
            )
        return tool

    def names(self) -> list[str]:
        """The tools' names, in their order."""
        return [*self._tools]

    def stateless(self) -> list[str]:
        """Names of the stateless tools."""
        return [tool.name for tool in self._tools.values() if tool.stateless]

    def schemas(self) -> list[ToolSchema]:
        """All tools as the model sees them."""
        return [tool.tool_schema for tool in self._tools.values()]


class ToolCalls(Collectors):
    """Counts the tool calls of this process."""

    def __init__(self, instances: Sized) -> None:
        self._calls = Counter("trackway_tool_calls", "Calls by tool and result", ["tool", "result"], registry=None)
        self._duration = OperationDuration(
            "execute_tool", "execute_tool", "Duration of tool calls in seconds", "gen_ai_tool_name"
        )
        count = Gauge("trackway_tool_instances", "Tool instances that exist", registry=None)
        count.set_function(lambda: len(instances))
        super().__init__(self._calls, self._duration, count)

    @contextmanager
    def one(self, tool: str) -> Iterator[None]:
        """Around one call. Its result is `ok`, an error's code, or `cancelled` when its caller left."""
        result = "internal"
        try:
            with self._duration.timed(tool):
                yield
            result = "ok"
        except TrackwayError as error:
            result = error.code.value
            raise
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        finally:
            self._calls.labels(tool, result).inc()


logger = logging.getLogger("trackway.tools")

Kwargs = Mapping[str, JsonValue]
NO_KWARGS: Kwargs = MappingProxyType({})


class ToolServer:
    """Creates, executes, rewards and releases. Every method raises TrackwayError."""

    def __init__(self, tools: Sequence[BaseTool | ToolSource], limits: ToolLimits, instances: InstanceTable) -> None:
        self._limits = limits
        self._registry = ToolRegistry()
        self._limited_tools: dict[str, LimitedTool] = {}
        self._sources = [source for source in tools if isinstance(source, ToolSource)]
        self._instances = instances
        self.calls = ToolCalls(instances)
        self._started: list[BaseTool | ToolSource] = []
        self._background: set[asyncio.Task[None]] = set()
        for tool in tools:
            if isinstance(tool, BaseTool):
                self._add(tool)

    def _add(self, tool: BaseTool) -> None:
        self._registry.add(tool)
        self._limited_tools[tool.name] = LimitedTool(tool, self._limits)

    async def start(self) -> None:
        """Load the sources' tools and start all tools. If one fails, all that were started are closed."""
        try:
            for source in self._sources:
                self._started.append(source)
                for tool in await source.open():
                    self._add(tool)
            for limited_tool in self._limited_tools.values():
                self._started.append(limited_tool.tool)
                await run_user_code(limited_tool.tool.start)
        except BaseException:
            await self.close()
            raise

    def schemas(self) -> list[ToolSchema]:
        """All tools as the model sees them."""
        return self._registry.schemas()

    def stateless(self) -> list[str]:
        """Names of the stateless tools, whose calls need no instance."""
        return self._registry.stateless()

    def lives(self, instance_id: str) -> bool:
        """Return whether the instance can still be called."""
        try:
            self._instances.get(instance_id)
        except TrackwayError:
            return False
        return True

    async def create(self, request: CreateInstance, run: str | None = None) -> InstanceCreated:
        """Create a tool's state for a trajectory. Its slots count for `run`, by default the trajectory's."""
        tool = self._registry.get(request.tool)
        run = run_of(request.session_id) if run is None else run
        if not self._instances.has_room(run):
            await self.reap()
        instance = self._instances.add(tool, request.session_id, run)
        try:
            with session_scope(request.session_id):
                await self._limited_tool(instance).create(instance.id, request.create_kwargs, instance.run)
        except BaseException:
            self._instances.strike(instance)
            raise
        self._instances.created(instance)
        return InstanceCreated(instance_id=instance.id, tool=tool.name)

    async def execute(
        self, instance_id: str, request: ExecuteRequest, begun: asyncio.Event | None = None
    ) -> ToolResult:
        """Run a call, in a span. `begun` is set when it has its instance, after the previous calls."""
        instance = self._instances.get(instance_id)
        name = instance.tool.name
        with self.calls.one(name), tool_span(name, request.arguments, request.tool_call_id) as span:
            result = await self._execute(instance, request, begun)
            _show(span, result)
        return result

    async def _execute(
        self, instance: Instance, request: ExecuteRequest, begun: asyncio.Event | None = None
    ) -> ToolResult:
        async with self._calling(instance) as limited_tool:
            if begun is not None:
                begun.set()
            return await limited_tool.execute(instance.id, request, instance.run)

    async def reward(self, instance_id: str, calc_reward_kwargs: Kwargs = NO_KWARGS) -> float:
        """The reward of an instance over all its calls."""
        instance = self._instances.get(instance_id)
        async with self._calling(instance) as limited_tool:
            return await limited_tool.reward(instance_id, {**calc_reward_kwargs}, instance.run)

    async def release(self, instance_id: str, release_kwargs: Kwargs = NO_KWARGS) -> None:
        """Release an instance. It is removed even when the tool's release fails."""
        await self._release(self._instances.get(instance_id), release_kwargs)

    async def release_session(self, session_id: str) -> SessionReleased:
        """Release every instance of a trajectory. A failure does not affect the others."""
        instances = self._instances.of_session(session_id)
        outcomes = await asyncio.gather(*map(self._release, instances), return_exceptions=True)
        failed = [
            f"{instance.id}: {outcome}"
            for instance, outcome in zip(instances, outcomes, strict=True)
            if outcome is not None
        ]
        return SessionReleased(released=len(instances) - len(failed), failed=failed)

    def instances(self, session_id: str | None, limit: int) -> InstanceList:
        """The instances, oldest first, without content."""
        table = self._instances
        living = table.everything() if session_id is None else table.of_session(session_id)
        return InstanceList(instances=[table.info(instance) for instance in living[:limit]], total=len(living))

    async def one_shot(self, tool: str, request: OneShotRequest) -> OneShotResult:
        """Create, execute, reward and release, in a span."""
        self._registry.get(tool)
        with self.calls.one(tool), tool_span(tool, request.arguments, request.tool_call_id) as span:
            result = await self._whole_life(tool, request)
            _show(span, result)
        return result

    async def _whole_life(self, tool: str, request: OneShotRequest) -> OneShotResult:
        creation = CreateInstance(tool=tool, create_kwargs=request.create_kwargs)
        created = await self.create(creation, run_of(request.session_id))
        instance = self._instances.get(created.instance_id)
        try:
            result = await self._execute(instance, request)
            instance_reward = await self.reward(instance.id, request.calc_reward_kwargs)
        finally:
            await self._quietly(self._release(instance, request.release_kwargs), instance)
        return OneShotResult(
            text=result.text, reward=result.reward, metrics=result.metrics, instance_reward=instance_reward
        )

    async def reap(self) -> int:
        """Release the expired instances. Returns their number."""
        expired = self._instances.take_expired()
        for instance in expired:
            logger.warning("instance %s (%s) of %r expired", instance.id, instance.session_id, instance.tool.name)
        releases = (
            self._quietly(self._limited_tool(instance).release(instance.id, {}), instance) for instance in expired
        )
        await asyncio.gather(*releases)
        return len(expired)

    async def close(self) -> None:
        """Release all instances and close the tools, at shutdown."""
        living = self._instances.everything()
        await asyncio.gather(*(self._quietly(self._release(instance), instance) for instance in living))
        while self._started:
            opened = self._started.pop()
            try:
                await run_user_code(opened.close)
            except Exception:
                logger.exception("%s did not close cleanly", opened.origin)

    async def _release(self, instance: Instance, release_kwargs: Kwargs = NO_KWARGS) -> None:
        limited_tool = self._limited_tool(instance)
        await self._instances.retire(instance, limited_tool.limits.wait_timeout_s)
        await limited_tool.release(instance.id, {**release_kwargs})

    @asynccontextmanager
    async def _calling(self, instance: Instance) -> AsyncIterator[LimitedTool]:
        """Within a call of an instance. If the tool does not stop in time, the instance is stuck until it does."""
        limited_tool = self._limited_tool(instance)
        async with self._instances.held(instance, limited_tool.limits.wait_timeout_s):
            try:
                yield limited_tool
            finally:
                if (work := limited_tool.still_running(instance.id)) is not None:
                    instance.move(Event.HANG)
                    self._keep(self._let_go(instance, work))

    async def _let_go(self, instance: Instance, work: asyncio.Task[object]) -> None:
        logger.error(
            "instance %s: a cancelled call of %r still runs; the instance is lost until it ends",
            instance.id,
            instance.tool.name,
        )
        await asyncio.wait({work})
        self._instances.strike(instance)
        await self._quietly(self._limited_tool(instance).release(instance.id, {}), instance)

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _quietly(self, release: Awaitable[None], instance: Instance) -> None:
        """Await a release and only log its failure: its result is unused, or another error is already raised."""
        try:
            await release
        except TrackwayError as error:
            logger.warning("instance %s was not released cleanly: %s", instance.id, error.message)

    def _limited_tool(self, instance: Instance) -> LimitedTool:
        return self._limited_tools[instance.tool.name]


def _show(span: SpanHandle, result: ToolResult) -> None:
    span.outputs({"text": result.text, "reward": result.reward})


def kwargs_of(extra_info: Mapping[str, JsonValue], tool: str, which: str) -> dict[str, JsonValue]:
    """`tools_kwargs.<tool>.<which>` of a row's `extra_info`, or an empty dict."""
    value: JsonValue = {**extra_info}
    for name in ("tools_kwargs", tool, which):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


SessionKey = tuple[str, ...]
"""The caller, and its name of the session: callers cannot reach each other's sessions by name."""

_REMEMBERED = 10_000
"""Maximum sessions whose expiry is remembered."""
_TELLS_LOSS = {ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND}


_EXPIRED = "was idle for too long and is gone"
_LOST = "is lost: its last call did not stop when it was cancelled"


@dataclass
class _Session:
    ids: dict[str, str] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    cut_off: set[str] = field(default_factory=set)
    """Tools whose state was lost with their last call; to be reported at the next call."""

    def fate(self, tool: str) -> str:
        """Why the tool's state is gone."""
        return _LOST if tool in self.cut_off else _EXPIRED


class SessionInstances:
    """One instance of each tool per session. Every method but `sweep` raises TrackwayError."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._sessions: dict[SessionKey, _Session] = {}
        self._lost_state: OrderedDict[SessionKey, dict[str, str]] = OrderedDict()
        """Tools of each session whose state is gone, with the reason to report at their next call."""
        self._calls: dict[asyncio.Task[tuple[str, ToolResult]], SessionKey | None] = {}
        """Active calls. With the session, if the caller has left."""

    async def execute(
        self, key: SessionKey, tool: str, request: ExecuteRequest, create_kwargs: dict[str, JsonValue]
    ) -> tuple[str, ToolResult]:
        """Run a call. Returns its instance's id and result. `create_kwargs` apply at the first call.

        If the caller disconnects, a running call continues within its limits, because cancelling it would lose the
        tool's state. The next call waits for it. A call that has not started is cancelled.
        INSTANCE_NOT_FOUND or INSTANCE_LOST, once, when the state is gone. The next call creates it again.
        """
        begun = asyncio.Event()
        call = asyncio.create_task(self._execute(key, tool, request, create_kwargs, begun))
        self._calls[call] = None
        call.add_done_callback(self._ended)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if begun.is_set():
                self._calls[call] = key
            else:
                call.cancel()
            raise

    async def _execute(
        self,
        key: SessionKey,
        tool: str,
        request: ExecuteRequest,
        create_kwargs: dict[str, JsonValue],
        begun: asyncio.Event,
    ) -> tuple[str, ToolResult]:
        session = self._sessions.setdefault(key, _Session())
        async with session.making:
            self._report_lost_state(key, session, tool)
            if tool not in session.ids:
                creation = CreateInstance(tool=tool, session_id=key[-1], create_kwargs=create_kwargs)
                session.ids[tool] = (await self._server.create(creation)).instance_id
        instance_id = session.ids[tool]
        try:
            result = await self._server.execute(instance_id, request, begun)
        except TrackwayError as error:
            if error.code in _TELLS_LOSS and session.ids.get(tool) == instance_id:
                del session.ids[tool]
            elif not self._server.lives(instance_id):
                session.cut_off.add(tool)
            raise
        session.cut_off.discard(tool)
        return instance_id, result

    def _ended(self, call: asyncio.Task[tuple[str, ToolResult]]) -> None:
        self._calls.pop(call, None)
        if not call.cancelled():
            call.exception()  # mark it as retrieved: its caller may have left

    async def close(self) -> None:
        """Cancel every call, at shutdown."""
        await _cut_off([*self._calls])

    async def rewards(self, key: SessionKey) -> dict[str, float]:
        """The rewards of the session's instances by tool."""
        session = self._sessions.get(key, _Session())
        return {tool: await self._server.reward(instance_id) for tool, instance_id in session.ids.items()}

    async def end(self, key: SessionKey) -> None:
        """Release the session's instances. An unknown session is no error."""
        self._lost_state.pop(key, None)
        await _cut_off([call for call, left in self._calls.items() if left == key])
        session = self._sessions.pop(key, _Session())
        for instance_id in session.ids.values():
            try:
                await self._server.release(instance_id)
            except TrackwayError:
                continue  # expired, or the tool's release failed: it is gone either way

    def sweep(self) -> None:
        """Remove the sessions whose instances have all expired, and remember that they did."""
        for key, session in list(self._sessions.items()):
            if not session.making.locked() and not any(map(self._server.lives, session.ids.values())):
                del self._sessions[key]
                if session.ids:
                    self._lost_state.setdefault(key, {}).update({tool: session.fate(tool) for tool in session.ids})
        while len(self._lost_state) > _REMEMBERED:
            self._lost_state.popitem(last=False)

    def _report_lost_state(self, key: SessionKey, session: _Session, tool: str) -> None:
        swept = self._lost_state.get(key, {})
        if tool in session.ids and not self._server.lives(session.ids[tool]):
            fate = session.fate(tool)
            del session.ids[tool]
        elif tool in swept:
            fate = swept.pop(tool)
        else:
            return
        session.cut_off.discard(tool)
        code = ErrorCode.INSTANCE_LOST if fate == _LOST else ErrorCode.INSTANCE_NOT_FOUND
        raise TrackwayError(code, f"the state of {tool} in this session {fate}; the next call makes a new one")


async def _cut_off(calls: list[asyncio.Task[tuple[str, ToolResult]]]) -> None:
    for call in calls:
        call.cancel()
    if calls:
        await asyncio.wait(calls)
