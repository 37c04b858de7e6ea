"""A run's own process: started, watched, started again when it dies, and its run's state settled when it has ended.

    exit 0: as the process says                     exit 3: FAILED, as the process says
    died:   RESTARTING from the last checkpoint, then FAILED
    exit 4: the run was given up as dead, or another service's process has it: it is no longer ours
    exit 5: FAILED, which the process could not write: the disk is full. The state is written once the disk takes it

The process holds a pipe from this one as its standard input: when the service goes, however it goes, the pipe closes,
and the process saves and ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from trackway.system import StorageError, writing
from trackway.trainer.run_state.exit_status import EXIT_FAILED, EXIT_STORAGE
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.ownership import Owner
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

STORAGE_RETRY_S = 1.0
"""Pause before a state that the disk refused is written again."""

T = TypeVar("T")

logger = logging.getLogger("trackway.trainer")


class Supervised:
    """One run's process, and the next one when it dies."""

    def __init__(
        self, folder: RunFolder, secrets: Mapping[str, str], stop_deadline_s: float, skip_damaged: bool = False
    ) -> None:
        self.stopping = False
        """It was asked to end."""
        self._is_interrupted = False
        self._folder = folder
        self._secrets = secrets
        self._stop_deadline_s = stop_deadline_s
        self._skip_damaged = skip_damaged
        self._process: Process | None = None
        self._closing = asyncio.Event()
        self.unwritten: StorageError | None = None
        """Why the state after the process's end cannot be written; it is tried again until it can."""

    async def run(self) -> None:
        """Until the run has ended or is another's; `start` comes first."""
        while self._process is not None:
            status = await self._process.wait()
            if not await self._written(partial(self._settle, status)):
                return
            try:
                await self.start()
            except (OSError, TrackwayError) as error:
                message = f"its process could not be started again: {error}; resume it"
                await self._written(partial(self._folder.move, RunState.FAILED, message))
                return

    async def start(self) -> None:
        """Start the process, which has the run from now on.

        Raises OSError when there is no room for one, and TrackwayError when the run's configuration cannot be read.
        """
        folder = self._folder
        variables = {"OMP_NUM_THREADS": str(folder.config().trackway.threads), "TOKENIZERS_PARALLELISM": "false"}
        flags = ["--lifeline", *(["--skip-damaged"] if self._skip_damaged else [])]
        with writing(folder.log, "worker.log"):
            log = folder.log.open("ab")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "trackway.trainer.worker", str(folder.path), *flags),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"TQDM_DISABLE": "1", **os.environ, **variables, **self._secrets},
                start_new_session=True,
            )
        self._owner = Owner.of(self._process.pid)
        try:
            folder.write_owner(self._owner)
        except OSError:
            self._process.kill()
            raise
        if self.stopping:  # asked for while nothing was there to be stopped
            self._signal(self._process)

    def stop(self, is_interrupted: bool = False) -> None:
        """Ask the worker to checkpoint and exit; kill it after the deadline.

        `is_interrupted` marks a service shutdown rather than a user's stop.
        """
        if is_interrupted:
            self._closing.set()
        if self.stopping:
            return
        self.stopping, self._is_interrupted = True, is_interrupted
        if self._process is not None:
            self._signal(self._process)

    def _signal(self, process: Process) -> None:
        if process.returncode is not None:
            return
        process.send_signal(signal.SIGUSR1 if self._is_interrupted else signal.SIGTERM)
        asyncio.get_running_loop().call_later(self._stop_deadline_s, _kill, process)

    async def _written(self, write: Callable[[], T]) -> T | None:
        """What a write of the run's state returns, tried again until the disk takes it.

        None when the service closes first: the next one finds a run whose process is gone.
        """
        while True:
            try:
                result = write()
            except StorageError as error:
                if self.unwritten is None:
                    logger.error("run %s: %s", self._folder.name, error)
                    self.unwritten = error
            else:
                self.unwritten = None
                return result
            if self._closing.is_set():
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), STORAGE_RETRY_S)

    def _settle(self, status: int) -> bool:
        """Say how the run stands after its process has ended; whether to start the next one. May be repeated."""
        folder = self._folder
        if folder.owner() != self._owner:
            logger.warning("run %s: its process ended with %s; another one has the run", folder.name, status)
        elif folder.ended():
            pass  # the process said how; what it died of afterwards, a SIGTERM at its very end for example, is nothing
        elif status in (0, EXIT_FAILED):
            folder.move(RunState.FAILED, f"its process ended with {status} and left no final state; see {folder.log}")
        elif status == EXIT_STORAGE:
            why = f": {self.unwritten.message}" if self.unwritten else ""
            remedy = f"see {folder.log}, then `trackway train --resume {folder.name}`"
            folder.move(RunState.FAILED, f"its disk did not take its files{why}; {remedy}")
        elif self.stopping or folder.info().state is RunState.STOPPING:
            self._settle_killed(status)
        else:
            return self._settle_dead(status)
        return False

    def _settle_killed(self, status: int) -> None:
        folder = self._folder
        if folder.info().state is not RunState.STOPPING:
            folder.move(RunState.STOPPING, interrupted=self._is_interrupted)
        message = f"its process ended by {_cause(status)}; it can be resumed from its last checkpoint"
        folder.move(RunState.STOPPED, message)

    def _settle_dead(self, status: int) -> bool:
        folder = self._folder
        info, died = folder.info(), f"the learner died ({_cause(status)})"
        try:
            allowed = folder.config().trackway.max_restarts
        except TrackwayError as error:
            folder.move(RunState.FAILED, f"{died}; {error.message}")
            return False
        if info.restarts >= allowed:
            folder.move(RunState.FAILED, f"{died} after {info.restarts} restarts; see {folder.log}, then resume")
            return False
        logger.warning("run %s: %s; starting it again", folder.name, died)
        message = f"{died}; restart {info.restarts + 1} of {allowed} from the last checkpoint"
        folder.move(RunState.RESTARTING, message, restarts=info.restarts + 1)
        self._skip_damaged = True  # no person is asked during a restart
        return True


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
