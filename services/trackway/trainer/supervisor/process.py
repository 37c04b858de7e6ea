"""Supervision of a run's process: start, wait, restart after a crash, and settle the run's state after its exit.

    exit 0: the state that the process wrote        exit 3: FAILED, written by the process
    crash:  RESTARTING from the last checkpoint, then FAILED
    exit 4: the run was marked dead, or a process of another service owns it
    exit 5: FAILED, which the process could not write on a full disk. It is written once the disk accepts it

The process's standard input is a pipe from the service. A line end on it wakes a run that is driven by calls. When the
service exits, for whatever reason, the pipe closes, and the process saves a checkpoint and exits.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from trackway.run_config import RunConfig
from trackway.system import StorageError, writing
from trackway.trainer.run_state.folder import Owner, RunFolder
from trackway.trainer.run_state.heartbeat import EXIT_FAILED, EXIT_STORAGE
from trackway.wire.trainer import RunState


async def launch(arguments: Sequence[str], secrets: Mapping[str, str], output: IO[bytes]) -> Process:
    """Start a worker in a session of its own, with a pipe as standard input, from which it reads its secrets.

    Its environment has blanks for them, since other processes of the same user can read it. Raises OSError when the
    system cannot start a process.
    """
    process = await _start(arguments, secrets, output)
    _tell(process, dict(secrets))
    return process


class Standby:
    """A worker that has loaded PyTorch before there is a run for it."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def start(self, secrets: Mapping[str, str]) -> None:
        """Start it. Its output is the service's until it has a run."""
        self._process = await _start(["--standby"], secrets, None)

    def take(self, arguments: Sequence[str], secrets: Mapping[str, str], log: Path) -> Process | None:
        """Give it a run, and return its process. None if there is none that lives."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return None
        _tell(process, {"arguments": list(arguments), "secrets": dict(secrets), "log": str(log)})
        return process

    async def end(self) -> None:
        """Kill it if no run has taken it."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _start(arguments: Sequence[str], secrets: Mapping[str, str], output: IO[bytes] | None) -> Process:
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trackway.trainer.worker", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={"TQDM_DISABLE": "1", **os.environ, **variables, **dict.fromkeys(secrets, "")},
        start_new_session=True,
    )


def _tell(process: Process, given: object) -> None:
    assert process.stdin is not None
    with contextlib.suppress(RuntimeError):  # uvloop's, when it has died
        process.stdin.write(json.dumps(given).encode() + b"\n")


STORAGE_RETRY_S = 1.0
"""Pause before another attempt to write a state that the disk refused."""

T = TypeVar("T")

logger = logging.getLogger("trackway.trainer")


class Supervised:
    """The process of one run, and its replacements after crashes."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        secrets: Mapping[str, str],
        stop_deadline_s: float,
        skip_damaged: bool = False,
        standby: Standby | None = None,
    ) -> None:
        self.stopping = False
        """True if a stop was requested."""
        self._is_interrupted = False
        self._folder = folder
        self._config = config
        self._secrets = secrets
        self._stop_deadline_s = stop_deadline_s
        self._skip_damaged = skip_damaged
        self._standby = standby or Standby()
        self._process: Process | None = None
        self._closing = asyncio.Event()
        self.unwritten: StorageError | None = None
        """Why the final state cannot be written. The write is repeated until it succeeds."""

    async def run(self) -> None:
        """Supervise until the run has ended or has another owner. Call `start` first."""
        while self._process is not None:
            status = await self._process.wait()
            if not await self._written(partial(self._settle, status)):
                return
            try:
                await self.start()
            except OSError as error:
                message = f"its process could not be restarted: {error}; resume it"
                await self._written(partial(self._folder.move, RunState.FAILED, message))
                return

    async def start(self) -> None:
        """Start the process and make it the run's owner. Raises OSError when the system cannot start a process."""
        folder = self._folder
        arguments = [str(folder.path), "--lifeline", *(["--skip-damaged"] if self._skip_damaged else [])]
        with writing(folder.log, "worker.log"):
            log = folder.log.open("ab")
        with log:
            waiting = self._standby.take(arguments, self._secrets, folder.log)
            self._process = waiting or await launch(arguments, self._secrets, log)
        self._owner = Owner.of(self._process.pid)
        try:
            folder.write_owner(self._owner)
        except OSError:
            self._process.kill()
            raise
        if self.stopping:  # requested before there was a process
            self._signal(self._process)

    def wake(self) -> None:
        """Tell the process that there are new calls."""
        if self._process is not None and self._process.returncode is None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError is uvloop's, once the process has died
                self._process.stdin.write(b"\n")

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
        """The result of a write of the run's state, repeated until the disk accepts it.

        None when the service closes first: the next service finds a run whose process has exited.
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
        """Write the run's state after its process has exited. True to start the next process. Idempotent."""
        folder = self._folder
        if folder.owner() != self._owner:
            logger.warning("run %s: its process exited with %s; another process owns the run", folder.name, status)
        elif folder.ended():
            pass  # the process wrote its final state; a later cause of death, such as a last SIGTERM, does not matter
        elif status in (0, EXIT_FAILED):
            folder.move(RunState.FAILED, f"its process exited with {status} and wrote no final state; see {folder.log}")
        elif status == EXIT_STORAGE:
            why = f": {self.unwritten.message}" if self.unwritten else ""
            remedy = f"see {folder.log}, then `trackway train --resume {folder.name}`"
            folder.move(RunState.FAILED, f"its files could not be written to its disk{why}; {remedy}")
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
        allowed = self._config.trackway.max_restarts
        if info.restarts >= allowed:
            folder.move(RunState.FAILED, f"{died} after {info.restarts} restarts; see {folder.log}, then resume")
            return False
        logger.warning("run %s: %s; restarting it", folder.name, died)
        message = f"{died}; restart {info.restarts + 1} of {allowed} from the last checkpoint"
        folder.move(RunState.RESTARTING, message, restarts=info.restarts + 1)
        self._skip_damaged = True  # an automatic restart cannot ask the user
        return True


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
