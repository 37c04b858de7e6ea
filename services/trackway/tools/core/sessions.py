"""Instances for callers that name a session and a tool: created at the session's first call of the tool."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from pydantic import JsonValue

from trackway.tools.core.server import ToolServer
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import CreateInstance, ExecuteRequest, ToolResult

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

        If the caller leaves, a running call continues within its limits, since cancelling it would lose the tool's
        state, and the next call waits for it. A call that has not started is cancelled.
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
