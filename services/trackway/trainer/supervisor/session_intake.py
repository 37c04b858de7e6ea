"""Hands finished sessions to the runs that train on them."""

from trackway.trainer.run_state.session_inbox import SessionInbox
from trackway.trainer.supervisor.registry import RunRegistry
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import FinishedSession, SessionRun, WaitingSessions
from trackway.wire.trainer import ENDED, RunInfo, RunState


class SessionIntake:
    """Sessions for the runs of one registry. Methods raise TrackwayError."""

    def __init__(self, registry: RunRegistry) -> None:
        self._registry = registry

    def run(self, name: str | None) -> SessionRun:
        """Settings that the run, or the only one in progress, fixes for its sessions.

        CONFLICT when it takes none, and without a name when several runs in progress take sessions.
        """
        info = self._in_progress() if name is None else self._registry.info(name)
        if info is None or _is_over(info):
            got = "none" if info is None else f"run {info.run!r}, which is {info.state}"
            message = f"expected a run in progress that trains on sessions, got {got}"
            raise TrackwayError(ErrorCode.CONFLICT, f"{message}; start one with trackway.rollouts_from=sessions")
        inbox = SessionInbox(self._registry.folder(info.run).path)
        return inbox.opened().run.model_copy(update={"step": info.step + 1})

    def _in_progress(self) -> RunInfo | None:
        """The run for sessions that name none: active before interrupted. Raises CONFLICT when several take some."""
        infos = [*self._registry.newest_first()]
        going_on = [info for info in infos if not _is_over(info)]
        candidates = [info for info in going_on if info.state not in ENDED] or going_on
        taking = [info for info in candidates if SessionInbox(self._registry.folder(info.run).path).is_open]
        if len(taking) > 1:
            names = " and ".join(sorted(info.run for info in taking))
            message = f"expected the name of a run in train.run, since {names} train on sessions, got none; name one"
            raise TrackwayError(ErrorCode.CONFLICT, message)
        return next(iter(taking or candidates or infos), None)

    def take(self, name: str, session: FinishedSession) -> WaitingSessions:
        """Keep the session until the run draws it. CONFLICT when the run has ended, OVERLOADED when too many wait."""
        info = self._registry.info(name)
        if _is_over(info):
            message = f"expected a run in progress, got run {name!r}, which is {info.state}: the session is not trained"
            raise TrackwayError(ErrorCode.CONFLICT, f"{message}; resume the run, then end the session again", run=name)
        return WaitingSessions(waiting=SessionInbox(self._registry.folder(name).path).put(session))


def _is_over(info: RunInfo) -> bool:
    """Return whether it takes no sessions any more. An interrupted run is resumed."""
    return info.state is RunState.FINISHED or (info.state in ENDED and not info.interrupted)
