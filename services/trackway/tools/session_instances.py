"""Instances for callers who name a session and a tool but no instance: made at the session's first call of the tool."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from pydantic import JsonValue

from trackway.tools.server import ToolServer
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import CreateInstance, ExecuteRequest, ToolResult

SessionKey = tuple[str, ...]
"""Who calls, and what that caller calls the session: nobody reaches the session of somebody else by its name."""

_REMEMBERED = 10_000
"""Sessions whose expiry is still to be told."""


@dataclass
class _Session:
    ids: dict[str, str] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionInstances:
    """One instance of each tool for a session. Every method but `sweep` raises TrackwayError."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._sessions: dict[SessionKey, _Session] = {}
        self._expired: OrderedDict[SessionKey, set[str]] = OrderedDict()

    async def execute(
        self, key: SessionKey, tool: str, request: ExecuteRequest, create_kwargs: dict[str, JsonValue]
    ) -> tuple[str, ToolResult]:
        """One call, and the instance that ran it; `create_kwargs` count at the first one.

        INSTANCE_NOT_FOUND once when the instance expired, that its state is not lost in silence; then it is made anew.
        """
        session = self._sessions.setdefault(key, _Session())
        async with session.making:
            self._tell_of_expiry(key, session, tool)
            if tool not in session.ids:
                creation = CreateInstance(tool=tool, session_id=key[-1], create_kwargs=create_kwargs)
                session.ids[tool] = (await self._server.create(creation)).instance_id
        instance_id = session.ids[tool]
        try:
            return instance_id, await self._server.execute(instance_id, request)
        finally:
            if not self._server.lives(instance_id) and session.ids.get(tool) == instance_id:
                del session.ids[tool]

    async def end(self, key: SessionKey) -> None:
        """Release what the session has; a session that never was is no error."""
        self._expired.pop(key, None)
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
                    self._expired.setdefault(key, set()).update(session.ids)
        while len(self._expired) > _REMEMBERED:
            self._expired.popitem(last=False)

    def _tell_of_expiry(self, key: SessionKey, session: _Session, tool: str) -> None:
        swept = self._expired.get(key, set())
        if tool in session.ids and not self._server.lives(session.ids[tool]):
            del session.ids[tool]
        elif tool in swept:
            swept.discard(tool)
        else:
            return
        message = f"the state of {tool} in this session was idle for too long and is gone; the next call begins anew"
        raise TrackwayError(ErrorCode.INSTANCE_NOT_FOUND, message)
