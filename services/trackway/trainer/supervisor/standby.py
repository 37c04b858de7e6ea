"""A worker process that is started with the service and has imported torch before the first run.

prepare -> it imports, then waits for a run on its standard input
take    -> it is the worker of a run, as if it had been started for it
close, or `wait_s` after its start -> it is killed; it owns nothing
"""

import asyncio
import contextlib
import logging
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from trackway.trainer.assignment import Assignment
from trackway.trainer.run_state.ownership import Owner
from trackway.trainer.settings import names_handed_over
from trackway.trainer.supervisor.launch import launch, send, worker_environment

OWN_DEADLINE_S = 30.0
"""Time after `wait_s` at which the process ends by itself, in case the service is suspended."""
EXIT_WAIT_S = 10.0
"""Longest wait for the exit of the killed process."""

logger = logging.getLogger("trackway.trainer")


class Standby:
    """At most one process in the life of a service; with `wait_s` 0 none."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._process: Process | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process while it waits for a run."""
        return self._process.pid if self._process else None

    async def prepare(self) -> None:
        """Start the process. A failure is logged, and the first run's worker is started as any other."""
        if self._wait_s == 0:
            return
        self._environment = worker_environment(names_handed_over())
        try:
            process = await launch(["--standby", f"{self._wait_s + OWN_DEADLINE_S}"], self._environment)
        except OSError as error:
            logger.warning("the standby worker could not be started: %s", error)
            return
        self._process, self._owner = process, Owner.of(process.pid)
        self._expiry = asyncio.get_running_loop().call_later(self._wait_s, self._kill)

    async def take(self, arguments: Sequence[str], log: Path, secrets: Mapping[str, str]) -> Process | None:
        """The process as the worker of a run; None when there is none left that has the environment of a new one."""
        process = self._process
        if process is None:
            return None
        if not self._owner.lives_here:
            self._leave()
            return None
        if self._environment != worker_environment(secrets):
            logger.info("the standby worker is not used: the service's environment has changed since it started")
            self._kill()
            return None
        self._leave()
        assignment = Assignment(arguments=list(arguments), log=log, environment=dict(secrets))
        try:
            await send(process, assignment).drain()
        except ConnectionError:  # it died just now
            return None
        return process

    async def close(self) -> None:
        """End the process if it waits for a run."""
        process = self._process
        self._kill()
        if process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), EXIT_WAIT_S)

    def _kill(self) -> None:
        process = self._process
        self._leave()
        if process is not None and process.returncode is None:
            process.kill()

    def _leave(self) -> None:
        self._process = None
        if self._expiry is not None:
            self._expiry.cancel()
