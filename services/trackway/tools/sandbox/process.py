"""A running interpreter, from the service's side: its limits, channel, output, memory use and exit."""

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import tempfile

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """Limits of an interpreter, and the files that it can read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int = Field(default=600, ge=1)
    """CPU seconds of a process over its lifetime. A session's interpreter accumulates the seconds of all its calls."""
    memory_mb: int = Field(default=1024, ge=64)
    """Megabytes of address space of one process (beyond it: MemoryError) and of memory of all together (beyond it they
    are killed). Files in /tmp come on top, see `disk_mb`."""
    processes: int = Field(default=32, ge=4)
    """Processes and threads at a time, the sandbox's own two included."""
    disk_mb: int = Field(default=64, ge=1)
    """Megabytes of /tmp, the only writable folder: private to the interpreter and held in memory."""
    output_chars: int = Field(default=8000, ge=100)
    """Characters kept of a call's output, half from the start and half from the end."""
    python: str | None = None
    """Path of the interpreter, with its packages: a virtual environment with numpy, say. None is the one that runs this
    service, without any package."""
    read_only_paths: list[str] = Field(default_factory=list)
    """Additional files and folders that the code may read, at the same paths, such as data sets."""
    max_interpreters: int = Field(default=128, ge=1, le=4096)
    """Maximum interpreters on this replica. A call that needs one more is answered 429."""
    allow_unsandboxed: bool = False
    """If isolation is not available, run the code anyway: with limits and a deadline, but with this service's rights
    to files, network and processes. Only for code that you would run yourself."""


MAX_FILES = 20_000
"""Maximum files in /tmp: empty files use kernel memory that no size limit covers."""
MAX_LOCKS = 10_000
"""Maximum file locks, which also use kernel memory."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOCK_LINE_BYTES = 40
"""The shortest line of /proc/locks."""
_STOP_ROUNDS = 20
_NOT_RUNNING = ("T", "t", "Z", "X")
"""States in /proc/<pid>/stat: stopped, stopped by a tracer, ended."""


class InterpreterProcess:
    """A process with this service's rights: a process group, and a temporary folder.

    popen: its stdout is the output of all its processes.
    channel: our end of the socket to the interpreter.
    """

    def __init__(
        self,
        popen: "subprocess.Popen[bytes]",
        channel: socket.socket,
        folder: "tempfile.TemporaryDirectory[str] | None" = None,
    ) -> None:
        self.popen = popen
        self.channel = channel
        self._folder = folder

    @property
    def output(self) -> int:
        """The file descriptor of the code's output."""
        assert self.popen.stdout is not None
        return self.popen.stdout.fileno()

    @property
    def ended(self) -> bool:
        """Return whether it has exited. `popen` then has its exit status."""
        return self.popen.poll() is not None

    def ready(self) -> None:
        """Called at the interpreter's first message."""
        return None

    def pause(self) -> None:
        """Stop the processes until `go_on`, where that is possible."""
        return None

    def go_on(self) -> None:
        """Continue the processes that `pause` stopped."""
        return None

    def excess(self, settings: SandboxSettings) -> str | None:
        """The exceeded limit, or None."""
        return None

    def kill(self) -> None:
        """Kill all processes. The channel closes at once."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release its resources, after its exit."""
        self.channel.close()
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        if self._folder is not None:
            self._folder.cleanup()


class SandboxedProcess(InterpreterProcess):
    """A process in bubblewrap. `popen` is bubblewrap, outside of the sandbox.

    info: the open file with bubblewrap's report on the sandbox's first process.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]", channel: socket.socket, info: io.FileIO) -> None:
        super().__init__(popen, channel)
        self._info = info
        self._first: tuple[int, int] | None = None

    @property
    def ended(self) -> bool:
        """Return whether all processes of the sandbox have exited: its first process exits last, maybe after
        bubblewrap."""
        if self.popen.poll() is None:
            return False
        return self._first is None or _is_readable(self._first[1])

    def ready(self) -> None:
        """Called when the sandbox can be inspected."""
        pid = int(json.loads(self._info.read(4096))["child-pid"])
        self._first = (pid, os.pidfd_open(pid))

    def pause(self) -> None:
        """Stop every process but the first, which runs no sandboxed code. Repeated until none is running.

        Processes that fork meanwhile may escape one call. The next stops them.
        """
        if self._first is None:
            return
        for _ in range(_STOP_ROUNDS):
            running = [pid for pid in _descendants(self._first[0]) if _state(pid) not in _NOT_RUNNING]
            if not running:
                return
            for pid in running:
                self._signal(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue every process."""
        if self._first is not None:
            for pid in _descendants(self._first[0]):
                self._signal(pid, signal.SIGCONT)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        """Signals only a process of this sandbox: a pid may have been reused since it was read."""
        assert self._first is not None
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{self._first[0]}/ns/pid"):
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)

    def excess(self, settings: SandboxSettings) -> str | None:
        """The limit that its processes exceed together, or None."""
        if self._first is None:
            return None
        try:
            return _excess(self._first[0], settings)
        except OSError:
            return None  # it has just exited

    def kill(self) -> None:
        """The kernel kills a pid namespace with its first process, which exits after all others."""
        if self._first is None:
            super().kill()
            return
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first[1], signal.SIGKILL)

    def close(self) -> None:
        """Release its resources, after its exit."""
        super().close()
        self._info.close()
        if self._first is not None:
            os.close(self._first[1])


def _is_readable(pidfd: int) -> bool:
    """The kernel's error for a process that has exited."""
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(0))


def _descendants(first: int) -> list[int]:
    """Process ids below `first`, as this process sees them."""
    pids, unvisited = [], [first]
    while unvisited:
        pid = unvisited.pop()
        with contextlib.suppress(OSError):  # it has just ended
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    unvisited.extend(map(int, children.read().split()))
        pids.append(pid)
    return pids[1:]


def _state(pid: int) -> str:
    """The letter in /proc/<pid>/stat. X when there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2][0]
    return "X"


def _excess(first: int, settings: SandboxSettings) -> str | None:
    root = f"/proc/{first}/root"
    living = [f"{root}/proc/{name}" for name in os.listdir(f"{root}/proc") if name.isdigit()]
    # Usually the kernel enforces this limit; bubblewrap's own first process may come on top.
    if len(living) > settings.processes + 1:
        return f"more than {settings.processes} processes"
    files = os.statvfs(f"{root}/tmp")
    if files.f_files - files.f_ffree > MAX_FILES:
        return f"more than {MAX_FILES} files"
    with open(f"{root}/proc/locks") as locks:
        if len(locks.read(MAX_LOCKS * _LOCK_LINE_BYTES)) == MAX_LOCKS * _LOCK_LINE_BYTES:
            return f"more than {MAX_LOCKS} locks on files"
    bound = (settings.memory_mb << 20) - _socket_bytes(first)
    if sum(map(_resident_bytes, living)) <= bound:
        return None
    # Forks share pages; the exact count, which is slower, counts them once.
    return f"more than {settings.memory_mb} MB of memory" if sum(map(_own_bytes, living)) > bound else None


def _socket_bytes(first: int) -> int:
    """Maximum memory of the sockets of its network namespace; the filter forbids larger buffers."""
    with open(f"/proc/{first}/net/sockstat") as sockstat, open("/proc/sys/net/core/wmem_default") as buffer:
        return int(sockstat.readline().split()[-1]) * int(buffer.read())


def _resident_bytes(process: str) -> int:
    with contextlib.suppress(OSError), open(f"{process}/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
    return 0


def _own_bytes(process: str) -> int:
    """Its memory, with its share of shared pages."""
    with contextlib.suppress(OSError), open(f"{process}/smaps_rollup") as rollup:
        return next((int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:")), 0)
    return 0
