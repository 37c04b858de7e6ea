"""Who has a run: one process, whichever machine it is on. A service decides that under a lock of the outputs folder."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from trackway.system import writing
from trackway.wire.errors import ErrorCode, TrackwayError


class Machine(BaseModel):
    """Where a pid means something; of two containers with one host name each has processes of its own."""

    model_config = ConfigDict(frozen=True)

    host: str
    boot: str
    """The kernel's id of this boot."""
    processes: str
    """The kernel's name of the pid namespace."""


class Owner(BaseModel):
    """A process, told apart from every other one on any machine; `worker.json` in the run's folder."""

    model_config = ConfigDict(frozen=True)

    machine: Machine
    pid: int
    started: int
    """Clock ticks between the machine's start and the process's: pids are used again."""

    @classmethod
    def of(cls, pid: int, machine: Machine | None = None) -> Self:
        """A process of this machine."""
        return cls(machine=machine or this_machine(), pid=pid, started=_started(pid) or 0)

    @property
    def lives_here(self) -> bool:
        """Whether this machine has the process; for an owner of this machine."""
        return _started(self.pid) == self.started


class Beat(BaseModel):
    """A sign of life; `heartbeat.json` in the run's folder."""

    model_config = ConfigDict(frozen=True)

    owner: Owner
    """Who lives: one that has lost the run may beat once more."""
    count: int
    """Grows every few seconds."""


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Machine(host=socket.gethostname(), boot=boot, processes=os.readlink("/proc/self/ns/pid"))


class OutputsLock:
    """Held by the one service that starts, resumes or gives up a run, for moments; a service may enter it twice."""

    def __init__(self, outputs: Path) -> None:
        self._outputs = outputs
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises TrackwayError(CONFLICT) while another service has it, StorageError where it cannot be written."""
        if self._is_held:
            yield
            return
        lock = self._outputs / ".runs.lock"
        with writing(lock, "the lock of the runs"):
            self._outputs.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"another trainer service is starting a run in {self._outputs}; ask again"
                raise TrackwayError(ErrorCode.CONFLICT, message) from None
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False


def _started(pid: int) -> int | None:
    """None when there is no such process, or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
