"""Every run of an outputs folder: who may start, resume and stop it, and where it stands.

    start, resume -> STARTING -> (the process: RUNNING ...) -> its end, as supervision.py settles it
    stop          -> SIGTERM, a deadline, SIGKILL -> STOPPED
    the service goes -> SIGUSR1, a deadline, SIGKILL -> STOPPED, interrupted

Everything is on disk, so a restarted service, or the one that takes this one's place on another machine, knows every
run. One of them has an active run: whose process that is says `worker.json`, and whether it lives says heartbeat.py.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import SecretStr

from trackway.tracing import TracingSettings
from trackway.trainer.checkpoint import named_checkpoint
from trackway.trainer.config import RunConfig, resolve
from trackway.trainer.heartbeat import DEAD_AFTER_S, Sightings
from trackway.trainer.owner import OutputsLock, Owner
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.settings import ServiceUrls, handed_over
from trackway.trainer.supervision import Supervised
from trackway.trainer.trace_check import check_backends
from trackway.trainer.tracking import check_loggers
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunRequest, RunState

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FOLLOW_S = 0.25
"""Pause between two looks at a growing metrics file."""

_GONE = "the trainer service went away while the run was active; resume goes on from its last checkpoint"


class Runs:
    """Every run under one outputs folder, of which one is active at a time. Methods raise TrackwayError."""

    def __init__(
        self,
        outputs: Path,
        services: ServiceUrls,
        stop_deadline_s: float = 120.0,
        tracing: TracingSettings | None = None,
        token: SecretStr | None = None,
        sightings: Sightings | None = None,
    ) -> None:
        self._outputs = outputs
        self.services = services
        """Around every run that starts or is resumed here."""
        self._tracing = tracing or TracingSettings()
        self._token = token
        self._stop_deadline_s = stop_deadline_s
        self._sightings = sightings or Sightings()
        self._active: dict[str, tuple[Supervised, asyncio.Task[None]]] = {}
        self._lock = asyncio.Lock()
        self._ours = OutputsLock(outputs)

    async def start(self, request: RunRequest) -> RunInfo:
        """Begin a new run; CONFLICT while another is active or when the name is taken.

        INVALID_REQUEST when it names a checkpoint that is not there, a logger that cannot log, or a backend of traces
        that a service cannot send to.
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
        return self.info(folder.name)

    async def resume(self, name: str, restarts: int = 0) -> RunInfo:
        """Go on from the run's last checkpoint; CONFLICT unless it is stopped or failed."""
        folder = self._existing(name)
        await self._check_tracking(folder.config())
        async with self._lock:
            with self._ours.held():
                self._require_idle()
                await self._gone(name)
                folder.write_owner(Owner.of(os.getpid()))
                folder.move(RunState.STARTING, restarts=restarts, interrupted=False)
                folder.write_services(self.services)
                await self._supervise(folder)
        return self.info(name)

    def interrupted(self) -> RunFolder | None:
        """A run to go on with, whose service or machine went; None while a run is active.

        One that went on by itself as often as `trackway.max_restarts` allows is left to whoever resumes it.
        """
        infos = self.list()
        if any(info.state not in ENDED for info in infos):
            return None
        for folder in (self._folder(info.run) for info in infos if info.interrupted):
            info = folder.info()
            if info.restarts < folder.config().trackway.max_restarts:
                return folder
            message = f"{info.message}; it went on by itself {info.restarts} times and does so no more: resume it"
            folder.update(interrupted=False, message=message)
        return None

    async def stop(self, name: str) -> RunInfo:
        """Ask the run's process to save and end, and answer at once; an interrupted one is not resumed by itself then.

        CONFLICT when the run is not active, or not in this service.
        """
        info = self.info(name)
        active = self._active.get(name)
        if info.state in ENDED and info.interrupted:
            return self._folder(name).update(interrupted=False)
        if info.state in ENDED or active is None:
            message = f"expected an active run to stop, got run {name!r}, which is {self._standing(info)}"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
        active[0].stop()
        return self.info(name)

    def info(self, name: str) -> RunInfo:
        """Where a run stands."""
        folder = self._existing(name)
        info = folder.info()
        if info.state in ENDED:
            return info
        if name in self._active:
            is_stopping = self._active[name][0].stopping
            return info.model_copy(update={"state": RunState.STOPPING}) if is_stopping else info
        if self._sightings.alive(folder):
            return info
        try:
            return self._give_up(folder)
        except TrackwayError:  # another service decides over it at this moment
            return info

    def list(self) -> list[RunInfo]:
        """Every run, by name."""
        folders = sorted(path.parent for path in self._outputs.glob("*/state.json"))
        return [self.info(folder.name) for folder in folders]

    def newest(self) -> RunInfo | None:
        """The active run, or else the one whose state changed last."""
        files = sorted(self._outputs.glob("*/state.json"), key=lambda path: path.stat().st_mtime)
        infos = [self.info(path.parent.name) for path in files]
        return next((info for info in infos if info.state not in ENDED), infos[-1] if infos else None)

    async def rows(self, name: str, follow: bool) -> AsyncIterator[MetricsRow]:
        """The run's metrics; with `follow`, new rows too until the run has ended.

        After a restart from a checkpoint, rows that were given before are not given again.
        """
        folder = self._existing(name)
        newest = -1
        while True:
            last_look = not follow or self.info(name).state in ENDED
            for row in folder.rows():
                if row.step > newest:
                    newest = row.step
                    yield row
            if last_look:
                return
            await asyncio.sleep(FOLLOW_S)

    async def close(self) -> None:
        """Interrupt every run of ours and wait until its process is gone."""
        for supervised, _ in self._active.values():
            supervised.stop(is_interrupted=True)
        while self._active:
            await self._gone(next(iter(self._active)))

    async def _check_tracking(self, config: RunConfig) -> None:
        check_loggers(config, self._tracing.mlflow_uri)
        await check_backends(config, self.services.traced, self._tracing, self._token)

    async def _supervise(self, folder: RunFolder) -> None:
        supervised = Supervised(folder, handed_over(self._tracing, self._token), self._stop_deadline_s)
        try:
            await supervised.start()
        except OSError as error:
            folder.move(RunState.FAILED, f"its process could not be started: {error}")
            raise
        self._active[folder.name] = supervised, asyncio.create_task(self._watch(folder.name, supervised))

    async def _watch(self, name: str, supervised: Supervised) -> None:
        try:
            await supervised.run()
        finally:
            del self._active[name]

    async def _gone(self, name: str) -> None:
        if name in self._active:
            await self._active[name][1]

    def _give_up(self, folder: RunFolder) -> RunInfo:
        """A run whose process is dead, unless another service has it by now."""
        with self._ours.held():
            info = folder.info()
            if info.state in ENDED or self._sightings.alive(folder):
                return info
            was_wanted = info.interrupted or info.state is not RunState.STOPPING
            return folder.move(RunState.FAILED, _GONE, interrupted=was_wanted)

    def _require_idle(self) -> None:
        busy = [info for info in self.list() if info.state not in ENDED]
        if busy:
            message = f"run {busy[0].run!r} is {self._standing(busy[0])} and one run is active at a time; "
            raise TrackwayError(ErrorCode.CONFLICT, message + "stop it, or wait until it ends", run=busy[0].run)

    def _standing(self, info: RunInfo) -> str:
        """The state, and of a run that another service has, where, and what helps if that is gone."""
        owner = self._folder(info.run).owner()
        if info.state in ENDED or info.run in self._active or owner is None:
            return info.state
        return (
            f"{info.state} in another trainer service, on {owner.machine.host} (stop it there; should that be gone, "
            f"it shows after {DEAD_AFTER_S:.0f} s without a sign of life: ask again then)"
        )

    def _existing(self, name: str) -> RunFolder:
        folder = self._folder(name)
        if not folder.exists:
            known = ", ".join(sorted(path.parent.name for path in self._outputs.glob("*/state.json"))) or "none"
            raise TrackwayError(ErrorCode.NOT_FOUND, f"no run {name!r}; the runs are: {known}", run=name)
        return folder

    def _folder(self, name: str) -> RunFolder:
        if RUN_NAME.fullmatch(name) is None:
            message = f"expected a run name of at most 128 letters, digits, '.', '_', '-', got {name!r}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return RunFolder(self._outputs / name)


def runnable(config: RunConfig) -> RunConfig:
    """The configuration, if it names a model and rows; else raises TrackwayError(INVALID_REQUEST)."""
    model, rows = config.actor_rollout_ref.model.path, config.data.train_files
    given = {"actor_rollout_ref.model.path": model, "data.train_files": rows}
    missing = [key for key, value in given.items() if not value]
    if missing:
        message = f"expected a value for {' and '.join(missing)}, got none; a run needs a model and rows"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return config
