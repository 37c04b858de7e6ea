"""One running interpreter, seen from the service: its channel, its output, its use of memory, its end."""

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import tempfile

from trackway.tools.sandbox.settings import SandboxSettings

MAX_FILES = 20_000
"""Files in /tmp: empty ones take kernel memory that no size bounds."""
MAX_LOCKS = 10_000
"""Locks on files, which take kernel memory as well."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOCK_LINE_BYTES = 40
"""The shortest line of /proc/locks."""
_STOP_ROUNDS = 20
_NOT_RUNNING = ("T", "t", "Z", "X")
"""States in /proc/<pid>/stat: stopped, stopped by a tracer, ended."""


class InterpreterProcess:
    """A process of this service's own rights: a process group, and a folder that goes with it.

    popen: its stdout is the output of everything that it starts.
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
        """The file number from which to read what the code prints."""
        assert self.popen.stdout is not None
        return self.popen.stdout.fileno()

    @property
    def ended(self) -> bool:
        """Whether it has ended; `popen` has its exit status then."""
        return self.popen.poll() is not None

    def ready(self) -> None:
        """The interpreter has spoken for the first time."""
        return None

    def pause(self) -> None:
        """Stop the processes until `go_on`, where that is possible."""
        return None

    def go_on(self) -> None:
        """Continue the processes that `pause` stopped."""
        return None

    def excess(self, settings: SandboxSettings) -> str | None:
        """What it has too much of, or None."""
        return None

    def kill(self) -> None:
        """End everything; the channel closes at once."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give back what it held; it has ended."""
        self.channel.close()
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        if self._folder is not None:
            self._folder.cleanup()


class SandboxedProcess(InterpreterProcess):
    """A process in bubblewrap; `popen` is bubblewrap, outside of the sandbox.

    info: the open file with bubblewrap's word on the sandbox's first process.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]", channel: socket.socket, info: io.FileIO) -> None:
        super().__init__(popen, channel)
        self._info = info
        self._first: tuple[int, int] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing in the sandbox lives: its first process ends last, and bubblewrap may end before it."""
        if self.popen.poll() is None:
            return False
        return self._first is None or _is_readable(self._first[1])

    def ready(self) -> None:
        """From here on the sandbox can be looked into."""
        pid = int(json.loads(self._info.read(4096))["child-pid"])
        self._first = (pid, os.pidfd_open(pid))

    def pause(self) -> None:
        """Stop every process but the first, which runs no code of the sandbox; repeated until none is left running.

        Processes that fork meanwhile may escape one call; the next stops them.
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
        """Only to a process of this sandbox: a pid may have become another's since it was read."""
        assert self._first is not None
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{self._first[0]}/ns/pid"):
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)

    def excess(self, settings: SandboxSettings) -> str | None:
        """What all its processes together have too much of, or None."""
        if self._first is None:
            return None
        try:
            return _excess(self._first[0], settings)
        except OSError:
            return None  # it has just ended

    def kill(self) -> None:
        """The kernel ends a process namespace with its first process, which has ended when all others have."""
        if self._first is None:
            super().kill()
            return
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first[1], signal.SIGKILL)

    def close(self) -> None:
        """Give back what it held; it has ended."""
        super().close()
        self._info.close()
        if self._first is not None:
            os.close(self._first[1])


def _is_readable(pidfd: int) -> bool:
    """So the kernel says that the process has ended."""
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
    """The letter in /proc/<pid>/stat; X when there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2][0]
    return "X"


def _excess(first: int, settings: SandboxSettings) -> str | None:
    root = f"/proc/{first}/root"
    living = [f"{root}/proc/{name}" for name in os.listdir(f"{root}/proc") if name.isdigit()]
    # Usually the kernel holds this bound; bubblewrap's own first process may come on top.
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
    # Forks share pages, and the exact count, which is slower, takes them once.
    return f"more than {settings.memory_mb} MB of memory" if sum(map(_own_bytes, living)) > bound else None


def _socket_bytes(first: int) -> int:
    """What the sockets of its network namespace may hold; the filter refuses to make their buffers larger."""
    with open(f"/proc/{first}/net/sockstat") as sockstat, open("/proc/sys/net/core/wmem_default") as buffer:
        return int(sockstat.readline().split()[-1]) * int(buffer.read())


def _resident_bytes(process: str) -> int:
    with contextlib.suppress(OSError), open(f"{process}/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
    return 0


def _own_bytes(process: str) -> int:
    """Its memory, of shared pages its share."""
    with contextlib.suppress(OSError), open(f"{process}/smaps_rollup") as rollup:
        return next((int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:")), 0)
    return 0
