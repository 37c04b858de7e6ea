"""The sessions of one agent replica, by their ids. An id names its replica."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from trackway.agent.sessions.session import Session
from trackway.agent.settings import AgentSettings
from trackway.serving.limits import OpenSessions
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import SESSION_ID, SessionAccess

_ID = re.compile(SESSION_ID)
_KEY = re.compile(rf"sk-({_ID.pattern})-[0-9a-f]{{32}}")
KEEP_S = 600.0
"""Seconds for which an ended session and its trajectory can still be read, unless `max_sessions` ended later."""


def replica_of(session_id: str) -> str | None:
    """The replica that a session lives in, or None for text that is no session id."""
    match = _ID.fullmatch(session_id)
    return match.group(1) if match else None


def session_of(key: str) -> str | None:
    """The session that a key is for, or None for text that is no session's key."""
    match = _KEY.fullmatch(key)
    return match.group(1) if match else None


@dataclass
class _Entry:
    session: Session
    ended_at: float | None = None


class Sessions:
    """The sessions of this replica: its rollouts' own, and at most `max_sessions` opened by callers.

    The last ones that ended, as many again, are kept for KEEP_S.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.replica = settings.replica
        self._base_url = settings.url("agent")
        self._max = settings.max_sessions
        self._entries: dict[str, _Entry] = {}
        most_of_one = settings.max_sessions_per_token if settings.auth.given else None
        self.opened = OpenSessions(
            self._max, most_of_one, settings.session_room_s, ("max_sessions", "max_sessions_per_token")
        )
        """The sessions that callers opened."""
        own = {"": settings.external} if settings.external is not None else {}
        self.programs = {
            name: asyncio.Semaphore(agent.max_running) for name, agent in {**own, **settings.external_agents}.items()
        }
        """Slots of each agent that this replica runs itself."""
        self.direct_url: Callable[[], str] = lambda: ""
        """The address of the replica's own port. Empty without one."""

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._entries

    def make_room(self, opener: str) -> None:
        """End the session that must end before the caller opens another one, if any. Raises OVERLOADED."""
        session_id = self.opened.to_end(opener)
        if session_id is not None:
            self._entries[session_id].session.give_way()
            self.opened.remove(session_id)

    def add(self, session: Session, opener: str | None) -> None:
        """Let calls find the session, which a caller has opened or else a rollout. Raises OVERLOADED."""
        if opener is not None:
            self.make_room(opener)
            self.opened.add(session.id, opener)
        self._forget_ended()
        self._entries[session.id] = _Entry(session)

    def _forget_ended(self) -> None:
        now = time.monotonic()
        ended = sorted((entry.ended_at, key) for key, entry in self._entries.items() if entry.ended_at is not None)
        too_many = len(ended) - self._max
        for place, (ended_at, session_id) in enumerate(ended):
            if place < too_many or now - ended_at >= KEEP_S:
                del self._entries[session_id]

    def ended(self, session: Session) -> None:
        """The session has ended: it is kept for a while."""
        self.opened.remove(session.id)
        if (entry := self._entries.get(session.id)) is not None:
            entry.ended_at = time.monotonic()
            self._forget_ended()

    def forget(self, session: Session) -> None:
        """Drop the session."""
        self.opened.remove(session.id)
        self._entries.pop(session.id, None)

    def find(self, session_id: str) -> Session:
        """The session. Raises NOT_FOUND when this replica does not have it."""
        entry = self._entries.get(session_id)
        if entry is None:
            message = (
                f"expected a session of this replica, got {session_id[:80]!r}: it was deleted, made room, or is none"
            )
            raise TrackwayError(ErrorCode.NOT_FOUND, f"{message}; open another one")
        return entry.session

    def access(self, session: Session) -> SessionAccess:
        """Return how the agent calls the model."""
        path, direct_url = f"/sessions/{session.id}/v1", self.direct_url()
        return SessionAccess(
            session_id=session.id,
            base_url=f"{self._base_url}{path}",
            direct_url=f"{direct_url}{path}" if direct_url else None,
            api_key=session.key,
            traceparent=session.traceparent,
        )

    def access_here(self, session: Session) -> SessionAccess:
        """The same for an agent on this host, which calls the replica's own port where there is one."""
        access = self.access(session)
        return access.model_copy(update={"base_url": access.direct_url or access.base_url})
