"""The state of each run of an outputs folder, as one service sees it; manager.py changes it.

Everything is on disk, so a restarted service, or its replacement on another machine, knows every run. The process that
owns an active run is named in `worker.json`. heartbeat.py decides whether it is alive.

`SessionIntake` hands finished sessions to the runs that train on them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trackway.system import StorageError, storage_problem
from trackway.trainer.delivery import with_tracking
from trackway.trainer.run_state.folder import STATE, OutputsLock, RunFolder, run_folders
from trackway.trainer.run_state.heartbeat import DEAD_AFTER_S, LivenessMonitor
from trackway.trainer.run_state.session_inbox import SessionInbox
from trackway.trainer.supervisor.process import Supervised
from trackway.wire.base import checked_run_name
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import FinishedSession, SessionRun, WaitingSessions
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunState

FOLLOW_S = 0.25
"""Interval between reads of a growing metrics file."""

logger = logging.getLogger("trackway.trainer")

_LOST = "the trainer service was lost while the run was active; resume continues from its last checkpoint"
_REWRITTEN = "its state file cannot be read; its process is alive and rewrites the file after the step"


class RunRegistry:
    """The runs of one outputs folder. Methods raise TrackwayError."""

    def __init__(self, outputs: Path, liveness: LivenessMonitor | None = None) -> None:
        self._outputs = outputs
        self._liveness = liveness or LivenessMonitor()
        self.active: dict[str, tuple[Supervised, asyncio.Task[None]]] = {}
        """The processes that this service supervises, by run. The manager adds and removes them."""
        self.outputs_lock = OutputsLock(outputs)
        """Held around each change of a run's owner or of a state that no process writes."""
        self._unreadable: set[str] = set()

    def info(self, name: str) -> RunInfo:
        """The status of a run."""
        folder = self.existing(name)
        info = folder.info()
        if info.state is RunState.UNREADABLE and (name in self.active or self._liveness.alive(folder)):
            info = info.model_copy(update={"state": RunState.RUNNING, "message": _REWRITTEN})
        if info.state in ENDED:
            return info
        if name in self.active:
            supervised = self.active[name][0]
            state = RunState.STOPPING if supervised.stopping else info.state
            return _while_active(info.model_copy(update={"state": state}), folder, supervised.unwritten)
        if self._liveness.alive(folder):
            return _while_active(info, folder)
        try:
            return self._give_up(folder)
        except StorageError as error:
            return _while_active(info, folder, error)
        except TrackwayError:  # another service holds the lock and decides
            return info

    def tracked(self, info: RunInfo) -> RunInfo:
        """The run with the data that MLflow and the other backends have not received."""
        return with_tracking(info, self.folder(info.run))

    def list(self) -> list[RunInfo]:
        """All runs, by name."""
        return sorted(self.newest_first(), key=lambda info: info.run)

    def active_or_newest(self) -> Sequence[RunInfo]:
        """The active runs, or else the run whose state changed last. Empty before the first run."""
        infos = [*self.newest_first()]
        return [info for info in infos if info.state not in ENDED] or infos[:1]

    async def rows(self, name: str, follow: bool) -> AsyncIterator[MetricsRow]:
        """The run's metrics. With `follow`, also new rows until the run has ended.

        After a restart from a checkpoint, rows that were already returned are not repeated.
        """
        folder = self.existing(name)
        newest = -1
        while True:
            is_last_read = not follow or self.info(name).state in ENDED
            for row in folder.rows():
                if row.step > newest:
                    newest = row.step
                    yield row
            if is_last_read:
                return
            await asyncio.sleep(FOLLOW_S)

    def newest_first(self) -> Iterator[RunInfo]:
        """All runs, the most recently changed first."""
        for folder in sorted(run_folders(self._outputs), key=_changed, reverse=True):
            with self.reading(folder.name):
                yield self.info(folder.name)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Skip a run whose files cannot be read, so that the others remain available. Logged once per run."""
        try:
            yield
        except (OSError, TrackwayError) as error:
            if name not in self._unreadable:
                logger.warning("run %s is left out: %s", name, error)
            self._unreadable.add(name)
        else:
            self._unreadable.discard(name)

    def _give_up(self, folder: RunFolder) -> RunInfo:
        """Mark a run whose process is dead FAILED, unless another service has taken it over.

        StorageError when the disk takes no files: then a live process cannot write its heartbeat either.
        """
        with self.outputs_lock.held():
            info = folder.info()
            if info.state in ENDED or self._liveness.alive(folder):
                return info
            problem = storage_problem(folder.path)
            if problem is not None:
                raise problem
            folder.disown()
            is_interrupted = info.interrupted or info.state is not RunState.STOPPING
            return folder.move(RunState.FAILED, _LOST, interrupted=is_interrupted)

    def require_settled(self, info: RunInfo) -> None:
        """Raise StorageError when a run appears active only because its final state cannot be written."""
        if info.run in self.active:
            unwritten = self.active[info.run][0].unwritten
            if unwritten is not None:
                raise unwritten
        elif info.state not in ENDED and not self._liveness.alive(self.folder(info.run)):
            self._give_up(self.folder(info.run))

    def standing(self, info: RunInfo) -> str:
        """The state. For a run of another service also its host and what to do if that host is lost."""
        owner = self.folder(info.run).owner()
        if info.state in ENDED or info.run in self.active or owner is None:
            return info.state
        return (
            f"{info.state} in another trainer service, on {owner.machine.host} (stop it there; if that host is lost, "
            f"try again after {DEAD_AFTER_S:.0f} s without a heartbeat)"
        )

    def existing(self, name: str) -> RunFolder:
        """The folder of a run. NOT_FOUND, with the names of the runs, when there is none."""
        folder = self.folder(name)
        if not folder.exists:
            known = ", ".join(folder.name for folder in run_folders(self._outputs)) or "none"
            raise TrackwayError(ErrorCode.NOT_FOUND, f"no run {name!r}; the runs are: {known}", run=name)
        return folder

    def folder(self, name: str) -> RunFolder:
        """The folder that a run of this name has or would have. INVALID_REQUEST for a name that no run may have."""
        try:
            return RunFolder(self._outputs / checked_run_name(name))
        except ValueError as error:
            raise TrackwayError(ErrorCode.INVALID_REQUEST, str(error)) from error


def _while_active(info: RunInfo, folder: RunFolder, unwritten: StorageError | None = None) -> RunInfo:
    """An active run's status: what it does, and a message when its disk is full, as it may be unable to write."""
    if info.state not in ENDED:
        activity = folder.activity()
        changes = {"waits": activity.waits, "rollout_states": activity.rollouts or info.rollout_states}
        info = info.model_copy(update=changes)
    if unwritten is not None:
        return info.model_copy(
            update={"message": f"its process has exited and its state cannot be written: {unwritten.message}"}
        )
    problem = None if info.message else storage_problem(folder.path)
    return info if problem is None else info.model_copy(update={"message": f"its disk is full: {problem.message}"})


def _changed(folder: RunFolder) -> float:
    try:
        return (folder.path / STATE).stat().st_mtime
    except OSError:
        return 0.0


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
    """Return whether the run no longer accepts sessions. An interrupted run will be resumed, so it still does."""
    return info.state is RunState.FINISHED or (info.state in ENDED and not info.interrupted)
