"""Bounds of the sessions that callers open: in all, and of one caller. An idle session makes room for another one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trackway.wire.errors import ErrorCode, TrackwayError


@dataclass
class _Open:
    caller: str
    used_at: float = field(default_factory=time.monotonic)
    requests: int = 0
    """Requests in progress."""


class OpenSessions:
    """Open sessions by id, at most `most`, and `most_of_one`, if given, of one caller.

    settings: names of these two settings, for messages.
    room_s: seconds without a request after which a session is ended if another one needs its room.
    """

    def __init__(self, most: int, most_of_one: int | None, room_s: float, settings: tuple[str, str]) -> None:
        self._most, self._most_of_one, self._room_s, self._settings = most, most_of_one, room_s, settings
        self._open: dict[str, _Open] = {}

    def to_end(self, caller: str) -> str | None:
        """The session to end before the caller opens another one, or None if there is room. Raises OVERLOADED."""
        candidates, most, setting = self._open, self._most, self._settings[0]
        own = {session_id: session for session_id, session in self._open.items() if session.caller == caller}
        if self._most_of_one is not None and len(own) >= self._most_of_one:
            candidates, most, setting = own, self._most_of_one, self._settings[1]
        if len(candidates) < most:
            return None
        idle = [(session.used_at, session_id) for session_id, session in candidates.items() if session.requests == 0]
        used_at, session_id = min(idle, default=(float("inf"), ""))
        if time.monotonic() - used_at >= self._room_s:
            return session_id
        whose = "" if candidates is self._open else f" of {caller!r}"
        raise TrackwayError(
            ErrorCode.OVERLOADED,
            f"expected fewer than {most} open sessions{whose} on this replica ({setting}), got as many; end some, or "
            f"ask again once one has been idle for {self._room_s:g} s",
        )

    def add(self, session_id: str, caller: str) -> None:
        """Count the session until it is removed."""
        self._open[session_id] = _Open(caller)

    def remove(self, session_id: str) -> str | None:
        """The caller of a session that has ended, or None for an unknown one."""
        removed = self._open.pop(session_id, None)
        return None if removed is None else removed.caller

    @contextmanager
    def in_use(self, session_id: str | None) -> Iterator[None]:
        """A request of the session, for the duration of the block."""
        session = None if session_id is None else self._open.get(session_id)
        if session is None:
            yield
            return
        session.requests += 1
        try:
            yield
        finally:
            session.requests -= 1
            session.used_at = time.monotonic()
