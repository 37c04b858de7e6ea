"""Instances for callers who name a session and a tool but no instance: made at the session's first call of the tool."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from pydantic import JsonValue

from trackway.tools.core.server import ToolServer
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import CreateInstance, ExecuteRequest, ToolResult

SessionKey = tuple[str, ...]
"""Who calls, and what that caller calls the session: nobody reaches the session of somebody else by its name."""

_REMEMBERED = 10_000
"""Sessions whose expiry is still to be told."""
_TELLS_LOSS = {ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND}


_EXPIRED = "was idle for too long and is gone"
_LOST = "is lost: its last call did not stop when it was told to"


@dataclass
class _Session:
    ids: dict[str, str] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    cut_off: set[str] = field(default_factory=set)
    """Tools whose state was lost with their last call, which is not told yet."""

    def fate(self, tool: str) -> str:
        """Why the state of a tool is gone."""
        return _LOST if tool in self.cut_off else _EXPIRED


class SessionInstances:
    """One instance of each tool for a session. Every method but `sweep` raises TrackwayError."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._sessions: dict[SessionKey, _Session] = {}
        self._gone: OrderedDict[SessionKey, dict[str, str]] = OrderedDict()
        """By session, the tools whose state is gone, and what is to be said of it at their next call."""
        self._calls: dict[asyncio.Task[tuple[str, ToolResult]], SessionKey | None] = {}
        """Calls at work; of those whose caller has left, the session."""

    async def execute(
        self, key: SessionKey, tool: str, request: ExecuteRequest, create_kwargs: dict[str, JsonValue]
    ) -> tuple[str, ToolResult]:
        """One call, and the instance that ran it; `create_kwargs` count at the first one.

        A caller who leaves while the call runs does not end it, which would cost the tool its state: it runs to its end
        within its limits, and the next call waits for it. A call that has not begun is dropped.
        INSTANCE_NOT_FOUND or INSTANCE_LOST, once, when the state is gone; the next call makes a new one.
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
            self._tell_what_is_gone(key, session, tool)
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
            call.exception()  # its caller may have left

    async def close(self) -> None:
        """Cut off every call: the process ends."""
        await _cut_off([*self._calls])

    async def end(self, key: SessionKey) -> None:
        """Release what the session has; a session that never was is no error."""
        self._gone.pop(key, None)
        await _cut_off([call for call, left in self._calls.items() if left == key])
        session = self._sessions.pop(key, _Session())
        for instance_id in session.ids.values():
            try:
                await self._server.release(instance_id)
            except TrackwayError:
                continue  # expired, or its tool failed to let go: it is gone either way

    def sweep(self) -> None:
        """Forget the sessions of which every instance has expired, but for the fact that they did."""
        for key, session in list(self._sessions.items()):
            if not session.making.locked() and not any(map(self._server.lives, session.ids.values())):
                del self._sessions[key]
                if session.ids:
                    self._gone.setdefault(key, {}).update({tool: session.fate(tool) for tool in session.ids})
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def _tell_what_is_gone(self, key: SessionKey, session: _Session, tool: str) -> None:
        swept = self._gone.get(key, {})
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
