"""Finished sessions on their way to the run that trains on them, as files of the run.

    sessions/run.json              what the run fixes for its sessions. Present once it takes some
    sessions/waiting/<id>.json     one FinishedSession, written by the service
    sessions/drawn/<id>.json       the run has drawn it. Removed once a checkpoint has it

The service and the run's process meet here. A session is on disk before its agent service is answered. A run that goes
back to a checkpoint finds what it had drawn since, and nothing that the checkpoint has.
"""

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from trackway.system import atomic_write, writing
from trackway.system.files import folder_time
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import FinishedSession, SessionRun

logger = logging.getLogger("trackway.trainer")

_END = ".json"


class OpenInbox(BaseModel):
    """A run that takes sessions."""

    run: SessionRun
    most: int
    """Most sessions that wait."""


class WaitingSession(NamedTuple):
    """A session that waits."""

    session_id: str
    group: int | str
    since_s: float
    """When it came, in seconds since 1970 by the clock that dates the run's files."""
    oldest_version: int | None
    """The weights of its oldest token, or None without tokens."""


class SessionInbox:
    """The finished sessions of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._file = folder / "sessions" / "run.json"
        self._waiting, self._drawn = folder / "sessions" / "waiting", folder / "sessions" / "drawn"
        self._known: dict[str, WaitingSession] = {}
        self._reading = Lock()

    def open(self, inbox: OpenInbox, trained: Collection[str]) -> None:
        """Take sessions from now on.

        Those that an earlier process had drawn wait again, except those that the checkpoint has, which are `trained`.
        Raises StorageError.
        """
        with writing(self._waiting, "finished sessions"):
            for folder in (self._waiting, self._drawn):
                folder.mkdir(parents=True, exist_ok=True)
            self.remove(
                [session_id for session_id in (*_ids(self._waiting), *_ids(self._drawn)) if session_id in trained]
            )
            for session_id in _ids(self._drawn):
                _file(self._drawn, session_id).rename(_file(self._waiting, session_id))
        self.announce(inbox)

    def announce(self, inbox: OpenInbox) -> None:
        """Change what the run fixes for sessions that are opened from now on. Raises StorageError."""
        atomic_write(self._file, inbox.model_dump_json())

    @property
    def is_open(self) -> bool:
        """Return whether the run takes sessions."""
        with suppress(TrackwayError):
            return bool(self.opened())
        return False

    def opened(self) -> OpenInbox:
        """Settings that the run fixes for its sessions. Raises CONFLICT when it does not take sessions."""
        with suppress(OSError, ValidationError):
            return OpenInbox.model_validate_json(self._file.read_bytes())
        message = f"expected a run that trains on sessions, got run {self._name!r}, which takes none"
        remedy = "start one with trackway.rollouts_from=sessions, or try again if it is starting"
        raise TrackwayError(ErrorCode.CONFLICT, f"{message}; {remedy}", run=self._name)

    def put(self, session: FinishedSession) -> int:
        """Keep a session for the run. Returns how many wait. A session that is here already changes nothing.

        Raises OVERLOADED when too many wait, CONFLICT when the run takes none, and StorageError.
        """
        most, waiting = self.opened().most, _ids(self._waiting)
        if session.session_id in waiting or _file(self._drawn, session.session_id).exists():
            return len(waiting)
        if len(waiting) >= most:
            message = f"expected fewer than {most} sessions that wait for run {self._name!r}, got {len(waiting)}"
            remedy = "end sessions more slowly, or raise trackway.max_waiting_sessions"
            raise TrackwayError(ErrorCode.OVERLOADED, f"{message}; {remedy}", run=self._name)
        atomic_write(_file(self._waiting, session.session_id), session.model_dump_json(), what="a finished session")
        return len(waiting) + 1

    def waiting(self) -> list[WaitingSession]:
        """The sessions that wait, in the order in which they came. A file that cannot be read is set aside."""
        with self._reading:
            ids = set(_ids(self._waiting))
            known = {session_id: self._known[session_id] for session_id in ids & self._known.keys()}
            for session_id in ids - known.keys():
                session = self._read(_file(self._waiting, session_id))
                if session is not None:
                    known[session_id] = session
            self._known = known
            return sorted(known.values(), key=lambda session: (session.since_s, session.session_id))

    def now_s(self) -> float:
        """The present by the clock of `WaitingSession.since_s`. Raises StorageError."""
        with writing(self._waiting, "the time of finished sessions"):
            return folder_time(self._waiting)

    def _read(self, file: Path) -> WaitingSession | None:
        try:
            since_s = file.stat().st_mtime
            session = FinishedSession.model_validate_json(file.read_bytes())
        except FileNotFoundError:  # it was drawn meanwhile
            return None
        except ValidationError as error:
            logger.warning("a session is not trained, its file %s cannot be read: %s", file, error)
            file.rename(file.with_suffix(".unreadable"))
            return None
        spans = [span for row in session.trajectory.rows for span in row.weight_versions]
        oldest = min((span.version for span in spans), default=None)
        return WaitingSession(session.session_id, session.group, since_s, oldest)

    def draw(self, sessions: Sequence[str]) -> list[FinishedSession]:
        """These, which are with the run from now on. Raises StorageError."""
        drawn: list[FinishedSession] = []
        with writing(self._drawn, "finished sessions"):
            for session_id in sessions:
                file = _file(self._waiting, session_id)
                drawn.append(FinishedSession.model_validate_json(file.read_bytes()))
                file.rename(_file(self._drawn, session_id))
        return drawn

    def remove(self, sessions: Collection[str]) -> None:
        """A checkpoint has these."""
        for session_id in sessions:
            for folder in (self._waiting, self._drawn):
                _file(folder, session_id).unlink(missing_ok=True)


def _file(folder: Path, session_id: str) -> Path:
    return folder / f"{session_id}{_END}"


def _ids(folder: Path) -> list[str]:
    try:
        return [name.removesuffix(_END) for name in os.listdir(folder) if name.endswith(_END) and name[0] != "."]
    except FileNotFoundError:
        return []
