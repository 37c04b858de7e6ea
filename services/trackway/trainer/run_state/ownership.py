"""Ownership of a run by one process on any machine, decided by a service under a lock of the outputs folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel, ConfigDict

from trackway.system import LockTaken, acquire_lock, writing
from trackway.wire.errors import ErrorCode, TrackwayError

_PROC = Path("/proc")


class Machine(BaseModel):
    """The scope of a pid. Two containers with the same host name have separate processes."""

    model_config = ConfigDict(frozen=True)

    host: str
    boot: str
    """The kernel's id of this boot, or its time where the kernel has no id."""
    processes: str
    """The kernel's name of the pid namespace. Empty where the kernel has none."""


class Owner(BaseModel):
    """A process, identified uniquely across machines. `worker.json` in the run's folder."""

    model_config = ConfigDict(frozen=True)

    machine: Machine
    pid: int
    started: int
    """When the process started, in clock ticks from the machine's boot or, without /proc, in milliseconds since 1970;
    pids are reused."""

    @classmethod
    def of(cls, pid: int, machine: Machine | None = None) -> Self:
        """A process of this machine."""
        return cls(machine=machine or this_machine(), pid=pid, started=_started(pid) or 0)

    @property
    def lives_here(self) -> bool:
        """Return whether the process is running; only for an owner on this machine."""
        return _started(self.pid) == self.started


class Beat(BaseModel):
    """A heartbeat of a process. `heartbeat.json` in the run's folder."""

    model_config = ConfigDict(frozen=True)

    owner: Owner
    """The process that wrote the beat. After losing the run it may write one more."""
    count: int
    """Increases every few seconds."""


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink(_PROC / "self/ns/pid")
    except FileNotFoundError:  # macOS has no id of a boot but its time, and one namespace of processes
        boot, processes = f"{psutil.boot_time():.0f}", ""
    return Machine(host=socket.gethostname(), boot=boot, processes=processes)


class OutputsLock:
    """Lock held briefly by the service that starts, resumes or marks a run; reentrant within a service."""

    def __init__(self, outputs: Path) -> None:
        self._outputs = outputs
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        Raises TrackwayError(CONFLICT) while another service holds it, StorageError when it cannot be written.
        """
        if self._is_held:
            yield
            return
        lock = self._outputs / ".runs.lock"
        with writing(lock, "the lock of the runs"):
            self._outputs.mkdir(parents=True, exist_ok=True)
            try:
                held = acquire_lock(lock, mode=None)
            except LockTaken:
                message = f"another trainer service is starting a run in {self._outputs}; try again"
                raise TrackwayError(ErrorCode.CONFLICT, message) from None
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            held.release()


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot. None when it does not exist or is a zombie.

    Without /proc, in milliseconds since 1970.
    """
    if not (_PROC / "self").exists():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
        return None
    try:
        fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
