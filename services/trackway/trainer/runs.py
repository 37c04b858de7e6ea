"""The supervisor: starts each run's process, watches it, and settles its state when it ends.

    start, resume -> STARTING -> (the process: RUNNING ...) -> exit 0: as the process says
                                                             -> exit 3: FAILED, as the process says
                                                             -> died:   RESTARTING from the last checkpoint, then FAILED
    stop          -> SIGTERM, a deadline, SIGKILL -> STOPPED

The process holds a pipe from this one as its standard input: when the service goes, however it goes, the pipe closes,
and the process saves and ends. Everything else is on disk, so a restarted service knows every run.
"""

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from trackway.tracing import TracingSettings
from trackway.trainer.checkpoint import named_checkpoint
from trackway.trainer.config import RunConfig, resolve
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.settings import ServiceUrls, handed_over
from trackway.trainer.trace_check import check_backends
from trackway.trainer.tracking import check_loggers
from trackway.trainer.worker import EXIT_FAILED
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, MetricsRow, RunInfo, RunRequest, RunState

logger = logging.getLogger("trackway.trainer")

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FOLLOW_S = 0.25
"""Pause between two looks at a growing metrics file."""


@dataclass
class _Active:
    """A process of ours and the task that watches it."""

    process: asyncio.subprocess.Process
    stopping: bool = False
    watch: asyncio.Task[None] | None = field(default=None, repr=False)


class Runs:
    """Every run under one outputs folder, of which one is active at a time. Methods raise TrackwayError."""

    def __init__(
        self,
        outputs: Path,
        services: ServiceUrls,
        stop_deadline_s: float = 120.0,
        tracing: TracingSettings | None = None,
        token: SecretStr | None = None,
    ) -> None:
        self._outputs = outputs
        self._services = services
        self._tracing = tracing or TracingSettings()
        self._token = token
        self._stop_deadline_s = stop_deadline_s
        self._active: dict[str, _Active] = {}
        self._lock = asyncio.Lock()
        self._closing = False

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
            self._require_idle()
            folder.create(config, self._services)
            await self._spawn(folder)
        return self.info(folder.name)

    async def resume(self, name: str) -> RunInfo:
        """Go on from the run's last checkpoint; CONFLICT unless it is stopped or failed."""
        folder = self._existing(name)
        await self._check_tracking(folder.config())
        async with self._lock:
            self._require_idle()
            await self._gone(name)
            folder.move(RunState.STARTING)
            folder.update(restarts=0)
            folder.write_services(self._services)
            await self._spawn(folder)
        return self.info(name)

    async def stop(self, name: str) -> RunInfo:
        """Ask the run's process to save and end; answers at once. CONFLICT when the run is not active."""
        info = self.info(name)
        active = self._active.get(name)
        if info.state in ENDED or active is None:
            message = f"expected an active run to stop, got run {name!r}, which is {info.state}"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=name)
        self._ask_to_stop(active)
        return self.info(name)

    def info(self, name: str) -> RunInfo:
        """Where a run stands."""
        folder = self._existing(name)
        info = folder.info()
        active = self._active.get(name)
        if info.state in ENDED:
            return info
        if active is not None:
            return info.model_copy(update={"state": RunState.STOPPING}) if active.stopping else info
        if folder.worker_alive():
            return info
        message = "the trainer service went away while the run was active; resume goes on from its last checkpoint"
        return folder.move(RunState.FAILED, message)

    def list(self) -> list[RunInfo]:
        """Every run, by name."""
        folders = sorted(path.parent for path in self._outputs.glob("*/state.json"))
        return [self.info(folder.name) for folder in folders]

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
        """Stop every process of ours and wait until it is gone."""
        self._closing = True
        while self._active:
            name, active = next(iter(self._active.items()))
            self._ask_to_stop(active)
            await self._gone(name)

    async def _check_tracking(self, config: RunConfig) -> None:
        check_loggers(config, self._tracing.mlflow_uri)
        await check_backends(config, self._services.traced, self._tracing, self._token)

    async def _spawn(self, folder: RunFolder) -> _Active:
        variables = {"OMP_NUM_THREADS": str(folder.config().trackway.threads), "TOKENIZERS_PARALLELISM": "false"}
        with folder.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "trackway.trainer.worker", str(folder.path), "--lifeline"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables, **handed_over(self._tracing, self._token)},
                start_new_session=True,
            )
        folder.write_pid(process.pid)
        active = self._active[folder.name] = _Active(process)
        active.watch = asyncio.create_task(self._watch(folder, active))
        return active

    async def _watch(self, folder: RunFolder, active: _Active) -> None:
        status = await active.process.wait()
        if folder.ended():
            pass  # the process said how; what it died of afterwards, a SIGTERM at its very end for example, is nothing
        elif status in (0, EXIT_FAILED):
            folder.move(RunState.FAILED, f"its process ended with {status} and left no final state; see {folder.log}")
        elif active.stopping or folder.info().state is RunState.STOPPING:
            self._settle_killed(folder, status)
        else:
            await self._settle_dead(folder, active, status)
        if self._active.get(folder.name) is active:
            del self._active[folder.name]

    def _settle_killed(self, folder: RunFolder, status: int) -> None:
        if folder.info().state is not RunState.STOPPING:
            folder.move(RunState.STOPPING)
        message = f"its process ended by {_cause(status)}; it can be resumed from its last checkpoint"
        folder.move(RunState.STOPPED, message)

    async def _settle_dead(self, folder: RunFolder, active: _Active, status: int) -> None:
        info = folder.info()
        allowed = folder.config().trackway.max_restarts
        died = f"the learner died ({_cause(status)})"
        if info.restarts >= allowed or self._closing:
            folder.move(RunState.FAILED, f"{died} after {info.restarts} restarts; see {folder.log}, then resume")
            return
        logger.warning("run %s: %s; starting it again", folder.name, died)
        folder.move(RunState.RESTARTING, f"{died}; restart {info.restarts + 1} of {allowed} from the last checkpoint")
        folder.update(restarts=info.restarts + 1)
        started = await self._spawn(folder)
        if active.stopping:  # asked for while nothing was there to be stopped
            self._ask_to_stop(started)

    def _ask_to_stop(self, active: _Active) -> None:
        if active.stopping:
            return
        active.stopping = True
        if active.process.returncode is not None:
            return
        active.process.terminate()
        asyncio.get_running_loop().call_later(self._stop_deadline_s, _kill, active.process)

    async def _gone(self, name: str) -> None:
        active = self._active.get(name)
        if active is not None and active.watch is not None:
            await active.watch

    def _require_idle(self) -> None:
        busy = [info for info in self.list() if info.state not in ENDED]
        if busy:
            name, state = busy[0].run, busy[0].state
            message = f"run {name!r} is {state} and one run is active at a time; stop it, or wait until it ends"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=name)

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


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
