"""The runs of an outputs folder: who may start, resume and stop one.

    start, resume -> STARTING -> (the process: RUNNING ...) -> its end, as supervision.py settles it
    stop          -> SIGTERM, a deadline, SIGKILL -> STOPPED
    the service goes -> SIGUSR1, a deadline, SIGKILL -> STOPPED, interrupted -> goes on by itself, or FAILED

Where a run stands says known_runs.py.
"""

import asyncio
import logging
import os
from pathlib import Path

from pydantic import SecretStr

from trackway.tracing import TracingSettings
from trackway.trainer.config import RunConfig, resolve
from trackway.trainer.run_state.checkpoint import named_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.heartbeat import LivenessMonitor
from trackway.trainer.run_state.ownership import Owner
from trackway.trainer.settings import ServiceUrls, handed_over
from trackway.trainer.supervisor.process import Supervised
from trackway.trainer.supervisor.registry import RunRegistry
from trackway.trainer.traces.preflight import check_backends
from trackway.trainer.tracking import check_loggers
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, RunInfo, RunRequest, RunState

logger = logging.getLogger("trackway.trainer")

GONE_S = 10.0
"""Longest wait for the end of a process whose run has ended, or is another's: it knows after a beat."""


class RunManager(RunRegistry):
    """Every run under one outputs folder, of which one is active at a time. Methods raise TrackwayError."""

    def __init__(
        self,
        outputs: Path,
        services: ServiceUrls,
        stop_deadline_s: float = 120.0,
        tracing: TracingSettings | None = None,
        token: SecretStr | None = None,
        sightings: LivenessMonitor | None = None,
    ) -> None:
        super().__init__(outputs, sightings)
        self.services = services
        """Around every run that starts or is resumed here."""
        self._tracing = tracing or TracingSettings()
        self._token = token
        self._stop_deadline_s = stop_deadline_s
        self._lock = asyncio.Lock()

    async def start(self, request: RunRequest) -> RunInfo:
        """Begin a new run; CONFLICT while another is active or when the name is taken.

        INVALID_REQUEST when it names a checkpoint that is not there, a logger that cannot log, or a backend of traces
        that a service cannot send to. StorageError, with no run begun, when its folder cannot be written.
        """
        config = runnable(resolve(request.config))
        named_checkpoint(config)
        await self._check_tracking(config)
        folder = self._folder(request.run or config.trainer.experiment_name)
        async with self._lock:
            with self._ours.held():
                self._require_idle()
                folder.create(config, self.services)
                await self._supervise(folder)
                self._supersede(folder.name)
        return self.info(folder.name)

    async def resume(self, name: str, *, by_itself: bool = False, skip_damaged: bool = False) -> RunInfo:
        """Go on from the run's last checkpoint, or the last one that is whole; CONFLICT unless it is stopped or failed.

        `by_itself`: nobody asks for it. That counts as a restart, and is a CONFLICT once somebody has stopped the run.
        """
        folder = self._existing(name)
        await self._check_tracking(folder.config())
        async with self._lock:
            await self._gone(folder)
            with self._ours.held():
                self._require_idle()
                before = folder.info()
                if by_itself and not before.interrupted:
                    message = f"expected an interrupted run to go on with, got run {name!r}, which is {before.state}"
                    raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
                folder.write_owner(Owner.of(os.getpid()))
                restarts = before.restarts + 1 if by_itself else 0
                folder.move(RunState.STARTING, restarts=restarts, interrupted=False)
                await self._supervise(folder, before.interrupted, skip_damaged or by_itself)
                if not by_itself:
                    self._supersede(name)
        return self.info(name)

    def interrupted(self) -> list[str]:
        """The runs to go on with, newest first, whose service or machine went; none while a run is active.

        One that went on by itself as often as `trackway.max_restarts` allows is failed, and left to whoever resumes it.
        """
        found: list[str] = []
        for info in self._newest_first():
            if info.state not in ENDED:
                return []
            if not info.interrupted:
                continue
            with self._reading(info.run):
                folder = self._folder(info.run)
                if info.restarts < folder.config().trackway.max_restarts:
                    found.append(info.run)
                else:
                    self._fail(folder, f"it went on by itself {info.restarts} times and does so no more: resume it")
        return found

    async def stop(self, name: str) -> RunInfo:
        """Ask the run's process to checkpoint and exit, and return at once. It is not auto-resumed.

        CONFLICT when the run is not active, or not in this service.
        """
        info = self.info(name)
        active = self._active.get(name)
        if info.state in ENDED and info.interrupted:
            if active is not None:  # given up by another service while this one stood still
                active[0].stop()
            with self._ours.held():
                folder = self._folder(name)
                info = folder.info()
                if info.state in ENDED:
                    return folder.update(interrupted=False)
        if info.state in ENDED or active is None:
            self._require_settled(info)
            message = f"expected an active run to stop, got run {name!r}, which is {self._standing(info)}"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
        active[0].stop()
        self._require_settled(info)
        return self.info(name)

    async def close(self) -> None:
        """Interrupt every run of ours and wait until its process is gone."""
        while self._active:
            for supervised, _ in self._active.values():
                supervised.stop(is_interrupted=True)
            await asyncio.wait([task for _, task in self._active.values()], return_when=asyncio.FIRST_COMPLETED)

    async def _check_tracking(self, config: RunConfig) -> None:
        check_loggers(config, self._tracing.mlflow_uri)
        await check_backends(config, self.services.traced, self._tracing, self._token)

    async def _supervise(self, folder: RunFolder, interrupted: bool = False, skip_damaged: bool = False) -> None:
        """Without a process it has failed; when not even that can be written, nobody has it, and a look gives it up."""
        secrets = handed_over(self._tracing, self._token)
        supervised = Supervised(folder, secrets, self._stop_deadline_s, skip_damaged)
        try:
            folder.write_services(self.services)
            await supervised.start()
        except BaseException as error:
            message = f"its process could not be started: {str(error) or type(error).__name__}"
            try:
                folder.move(RunState.FAILED, message, interrupted=interrupted)
            except OSError:
                folder.disown()
            raise
        self._active[folder.name] = supervised, asyncio.create_task(self._watch(folder.name, supervised))

    async def _watch(self, name: str, supervised: Supervised) -> None:
        try:
            await supervised.run()
        except Exception:
            # Any error from the run's folder: the next status check finds the process dead and marks the run.
            logger.exception("run %s is watched no more", name)
        finally:
            del self._active[name]

    async def _gone(self, folder: RunFolder) -> None:
        if folder.name not in self._active or not folder.ended():
            return
        supervised, task = self._active[folder.name]
        await asyncio.wait([task], timeout=GONE_S)
        if not task.done():
            supervised.stop(is_interrupted=True)  # which kills one that stands still
            message = f"the last process of run {folder.name!r} has not ended yet; ask again"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=folder.name)

    def _fail(self, folder: RunFolder, reason: str) -> None:
        """An interrupted run goes on by itself no more, though nobody has stopped it."""
        with self._ours.held():
            info = folder.info()
            if info.state in ENDED and info.interrupted:
                folder.move(RunState.FAILED, f"{info.message}; {reason}", interrupted=False)

    def _supersede(self, name: str) -> None:
        """Whoever starts a run does not want an interrupted one to begin, unasked, after it."""
        for info in self.list():
            if info.state in ENDED and info.interrupted:
                self._fail(self._folder(info.run), f"run {name!r} was started instead of it: resume it")

    def _require_idle(self) -> None:
        busy = [info for info in self.list() if info.state not in ENDED]
        if busy:
            self._require_settled(busy[0])
            message = f"run {busy[0].run!r} is {self._standing(busy[0])} and one run is active at a time; "
            raise TrackwayError(ErrorCode.CONFLICT, message + "stop it, or wait until it ends", run=busy[0].run)


def runnable(config: RunConfig) -> RunConfig:
    """The configuration, if it names a model and what to do with it; else raises TrackwayError(INVALID_REQUEST)."""
    model, rows = config.actor_rollout_ref.model.path, config.data.train_files
    given = {"actor_rollout_ref.model.path": model, "data.train_files": rows}
    missing = [key for key, value in given.items() if not value]
    if missing:
        message = f"expected a value for {' and '.join(missing)}, got none; a run needs a model and rows"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    if config.trainer.val_only and not config.data.val_files:
        message = "trainer.val_only=true: expected rows in data.val_files, got none; name them, or leave val_only out"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return config
