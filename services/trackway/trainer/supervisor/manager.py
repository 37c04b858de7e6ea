"""Starts, stops and resumes the runs of an outputs folder.

    start, resume     -> STARTING -> (the process: RUNNING ...) -> its final state, settled by process.py
    stop              -> SIGTERM, a deadline, SIGKILL -> STOPPED
    service shutdown  -> SIGUSR1, a deadline, SIGKILL -> STOPPED, interrupted -> auto-resumed, or FAILED

registry.py reports the state of each run.
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

EXIT_WAIT_S = 10.0
"""Longest wait for the exit of a process whose run has ended or has a new owner, which it learns at its next beat."""


class RunManager(RunRegistry):
    """The runs of one outputs folder, at most one of them active. Methods raise TrackwayError."""

    def __init__(
        self,
        outputs: Path,
        services: ServiceUrls,
        stop_deadline_s: float = 120.0,
        tracing: TracingSettings | None = None,
        token: SecretStr | None = None,
        liveness: LivenessMonitor | None = None,
    ) -> None:
        super().__init__(outputs, liveness)
        self.services = services
        """Services for every run that is started or resumed here."""
        self._tracing = tracing or TracingSettings()
        self._token = token
        self._stop_deadline_s = stop_deadline_s
        self._lock = asyncio.Lock()

    async def start(self, request: RunRequest) -> RunInfo:
        """Start a new run; CONFLICT while another run is active or when the name is taken.

        INVALID_REQUEST when the configuration names a missing checkpoint, a logger that cannot log, or a trace backend
        that a service cannot send to. StorageError, and no run is started, when its folder cannot be written.
        """
        config = runnable(resolve(request.config))
        named_checkpoint(config)
        await self._check_tracking(config)
        folder = self._folder(request.run or config.trainer.experiment_name)
        async with self._lock:
            with self._outputs_lock.held():
                self._require_idle()
                folder.create(config, self.services)
                await self._supervise(folder)
                self._supersede(folder.name)
        return self.info(folder.name)

    async def resume(self, name: str, *, by_itself: bool = False, skip_damaged: bool = False) -> RunInfo:
        """Resume a run from its last checkpoint, or its last intact one; CONFLICT unless it is stopped or failed.

        `by_itself` marks an automatic resume. It counts as a restart, and is a CONFLICT once a user has stopped the
        run.
        """
        folder = self._existing(name)
        await self._check_tracking(folder.config())
        async with self._lock:
            await self._gone(folder)
            with self._outputs_lock.held():
                self._require_idle()
                before = folder.info()
                if by_itself and not before.interrupted:
                    message = f"expected an interrupted run to resume, got run {name!r}, which is {before.state}"
                    raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
                folder.write_owner(Owner.of(os.getpid()))
                restarts = before.restarts + 1 if by_itself else 0
                folder.move(RunState.STARTING, restarts=restarts, interrupted=False)
                await self._supervise(folder, before.interrupted, skip_damaged or by_itself)
                if not by_itself:
                    self._supersede(name)
        return self.info(name)

    def interrupted(self) -> list[str]:
        """The runs to resume, newest first, whose service or machine was lost; none while a run is active.

        A run that was auto-resumed as often as `trackway.max_restarts` allows is marked FAILED; a user may resume it.
        """
        names: list[str] = []
        for info in self._newest_first():
            if info.state not in ENDED:
                return []
            if not info.interrupted:
                continue
            with self._reading(info.run):
                folder = self._folder(info.run)
                if info.restarts < folder.config().trackway.max_restarts:
                    names.append(info.run)
                else:
                    message = f"it was resumed automatically {info.restarts} times, the most allowed; resume it by hand"
                    self._fail(folder, message)
        return names

    async def stop(self, name: str) -> RunInfo:
        """Ask the run's process to checkpoint and exit, and return at once. It is not auto-resumed.

        CONFLICT when the run is not active, or not in this service.
        """
        info = self.info(name)
        active = self._active.get(name)
        if info.state in ENDED and info.interrupted:
            if active is not None:  # marked dead by another service while this one was suspended
                active[0].stop()
            with self._outputs_lock.held():
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
        """Interrupt the runs of this service and wait until their processes have exited."""
        while self._active:
            for supervised, _ in self._active.values():
                supervised.stop(is_interrupted=True)
            await asyncio.wait([task for _, task in self._active.values()], return_when=asyncio.FIRST_COMPLETED)

    async def _check_tracking(self, config: RunConfig) -> None:
        check_loggers(config, self._tracing.mlflow_uri)
        await check_backends(config, self.services.traced, self._tracing, self._token)

    async def _supervise(self, folder: RunFolder, interrupted: bool = False, skip_damaged: bool = False) -> None:
        """Start the run's process and watch it.

        If it cannot start, the run is marked FAILED. If even that write fails, ownership is dropped so that the next
        status check marks the run.
        """
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
            logger.exception("run %s is no longer supervised", name)
        finally:
            del self._active[name]

    async def _gone(self, folder: RunFolder) -> None:
        if folder.name not in self._active or not folder.ended():
            return
        supervised, task = self._active[folder.name]
        await asyncio.wait([task], timeout=EXIT_WAIT_S)
        if not task.done():
            supervised.stop(is_interrupted=True)  # kills a suspended process after the deadline
            message = f"the last process of run {folder.name!r} has not exited yet; try again"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=folder.name)

    def _fail(self, folder: RunFolder, reason: str) -> None:
        """An interrupted run goes on by itself no more, though nobody has stopped it."""
        with self._outputs_lock.held():
            info = folder.info()
            if info.state in ENDED and info.interrupted:
                folder.move(RunState.FAILED, f"{info.message}; {reason}", interrupted=False)

    def _supersede(self, name: str) -> None:
        """Whoever starts a run does not want an interrupted one to begin, unasked, after it."""
        for info in self.list():
            if info.state in ENDED and info.interrupted:
                self._fail(self._folder(info.run), f"run {name!r} was started instead; resume this run by hand")

    def _require_idle(self) -> None:
        busy = [info for info in self.list() if info.state not in ENDED]
        if busy:
            self._require_settled(busy[0])
            message = f"run {busy[0].run!r} is {self._standing(busy[0])} and one run is active at a time; "
            raise TrackwayError(ErrorCode.CONFLICT, message + "stop it, or wait until it ends", run=busy[0].run)


def runnable(config: RunConfig) -> RunConfig:
    """The configuration, checked to name a model and rows. Raises TrackwayError(INVALID_REQUEST)."""
    model, rows = config.actor_rollout_ref.model.path, config.data.train_files
    required = {"actor_rollout_ref.model.path": model, "data.train_files": rows}
    missing = [key for key, value in required.items() if not value]
    if missing:
        message = f"expected a value for {' and '.join(missing)}, got none; a run needs a model and rows"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    if config.trainer.val_only and not config.data.val_files:
        message = "trainer.val_only=true: expected rows in data.val_files, got none; name them, or leave val_only out"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return config
