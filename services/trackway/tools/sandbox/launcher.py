"""Starts interpreters: in bubblewrap with a filter of system calls, or bare where that is allowed.

The filter denies two kinds of calls: memory that no other limit covers (anonymous files, shared memory without a file,
huge pages, pages that a pipe keeps, System V and POSIX queues, larger socket buffers), and kernel interfaces without
use for the code. Everything else is allowed. Sockets connect only processes of one sandbox, and the monitor counts
them (process.py).
"""

import contextlib
import errno
import json
import os
import platform
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trackway.tools.sandbox.process import InterpreterProcess, SandboxedProcess, SandboxSettings
from trackway.wire.errors import ErrorCode, TrackwayError

_DENIED_X86_64 = {
    "shmget": 29,
    "semget": 64,
    "setsockopt": 54,
    "msgget": 68,
    "ptrace": 101,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "inotify_init": 253,
    "unshare": 272,
    "splice": 275,
    "tee": 276,
    "vmsplice": 278,
    "inotify_init1": 294,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "memfd_create": 319,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "memfd_secret": 447,
}
_DENIED_AARCH64 = {
    "inotify_init1": 26,
    "vmsplice": 75,
    "splice": 76,
    "tee": 77,
    "setsockopt": 208,
    "fanotify_init": 262,
    "setns": 268,
    "unshare": 97,
    "ptrace": 117,
    "mq_open": 180,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "perf_event_open": 241,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
    "io_uring_setup": 425,
    "memfd_secret": 447,
}
_CLONE3 = 435
_MAP_SHARED_ANONYMOUS = 0x21
_MAP_HUGETLB = 0x40000
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000

_MACHINES = {
    # machine: (audit's number of it, socket, clone, mmap, denied)
    "x86_64": (0xC000003E, 41, 56, 9, _DENIED_X86_64),
    "aarch64": (0xC00000B7, 198, 220, 222, _DENIED_AARCH64),
}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40
"""Offsets in the kernel's `struct seccomp_data`."""
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for bubblewrap's `--seccomp`, or None for a machine whose system call numbers are not known here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, socket_call, clone_call, mmap_call, denied = known
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_IF_EQUAL, architecture, no=0, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        *_when(_IF_AT_LEAST, _X32_BIT, [_refuse(errno.ENOSYS)]),
        # Its flags are in memory, which a filter cannot read; the C library falls back to clone.
        *_when(_IF_EQUAL, _CLONE3, [_refuse(errno.ENOSYS)]),
        *(line for number in denied.values() for line in _when(_IF_EQUAL, number, [_refuse(errno.EPERM)])),
        *_when(_IF_EQUAL, clone_call, _by_argument(_IF_ANY_BIT, _CLONE_NEWUSER, _refuse(errno.EPERM), _allow())),
        *_when(_IF_EQUAL, socket_call, _by_argument(_IF_EQUAL, socket.AF_UNIX, _allow(), _refuse(errno.EAFNOSUPPORT))),
        *_when(_IF_EQUAL, mmap_call, _mmap()),
        _allow(),
    ]
    return b"".join(lines)


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _allow() -> bytes:
    return _line(_RETURN, _ALLOW)


def _refuse(error: int) -> bytes:
    return _line(_RETURN, 0x00050000 | error)


def _when(test: int, value: int, then: list[bytes]) -> list[bytes]:
    """`then` must end in a return."""
    return [_line(test, value, no=len(then)), *then]


def _mmap() -> list[bytes]:
    """Shared memory needs a file in /tmp, whose size is limited. Otherwise it outlives the processes that map it."""
    return [
        _line(_LOAD, _FOURTH_ARGUMENT),
        *_when(_IF_ANY_BIT, _MAP_HUGETLB, [_refuse(errno.ENOMEM)]),
        _line(_AND, _MAP_SHARED_ANONYMOUS),
        *_when(_IF_EQUAL, _MAP_SHARED_ANONYMOUS, [_refuse(errno.EPERM)]),
        _allow(),
    ]


def _by_argument(test: int, value: int, yes: bytes, no: bytes) -> list[bytes]:
    return [_line(_LOAD, _FIRST_ARGUMENT), _line(test, value, no=1), yes, no]


_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_DESCRIBE = """
import json, os, site, sys, sysconfig
print(json.dumps({
    "base": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "packages": [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
}))
"""


@dataclass(frozen=True)
class PythonFiles:
    """An interpreter and the paths that it reads.

    arguments: its command line up to the program.
    executables: every name of the executable on the way through links, beside the real file.
    visible: folders, files and links it needs, at their own paths.
    hidden: folders within them that stay empty.
    """

    arguments: tuple[str, ...]
    executables: tuple[tuple[str, str], ...]
    visible: tuple[str, ...]
    hidden: tuple[str, ...]


def python_files(python: str | None) -> PythonFiles:
    """The files of an interpreter with its packages, or of the one that runs this process, without any package.

    ValueError when `python` cannot be run.
    """
    started = os.path.abspath(python) if python else os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    description = _described(started)
    base_prefix = str(description["base_prefix"])
    visible = [*_SYSTEM_LIBRARIES, f"{base_prefix}/lib", f"{base_prefix}/lib64"]
    if description["prefix"] != base_prefix:
        visible.append(str(description["prefix"]))
    return PythonFiles(
        arguments=(started, "-I", "-X", "utf8") if python else (started, "-I", "-S", "-X", "utf8"),
        executables=tuple((str(description["base"]), name) for name in _names(started)),
        visible=tuple(dict.fromkeys(path for path in visible if os.path.lexists(path))),
        hidden=() if python else tuple(sorted({path for path in description["packages"] if Path(path).is_dir()})),
    )


def _described(python: str) -> dict[str, str | list[str]]:
    try:
        described = subprocess.run(
            [python, "-I", "-c", _DESCRIBE], capture_output=True, text=True, timeout=60, check=True, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"expected `python` to be the path of a Python interpreter, got {python!r}") from error
    return json.loads(described.stdout)


def _names(executable: str) -> list[str]:
    names = [executable]
    while os.path.islink(names[-1]):
        names.append(os.path.normpath(os.path.join(os.path.dirname(names[-1]), os.readlink(names[-1]))))
    return names


_DEVICES = ("null", "full", "random", "urandom")
"""Not `zero`: memory shared through it has no limit."""
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
_NOTHING = ("--size", "4096", "--tmpfs")
"""A minimal file system. Made read-only after its content is set."""

_ORDINARY = ("--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000")
_ROOT = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")


def bubblewrap_options(
    files: PythonFiles, settings: SandboxSettings, as_root: bool, seccomp: int | None, info: int
) -> list[str]:
    """All of bubblewrap's arguments.

    as_root: whether this process is root; then the interpreter itself changes to another user, and no user namespace
        is needed. Otherwise bubblewrap makes one, in which the code is an ordinary user as well.
    seccomp, info: numbers of the open files with the system call filter and for the process id.
    """
    return [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *(_ROOT if as_root else _ORDINARY),
        *("--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox", "--info-fd", str(info)),
        *(() if seccomp is None else ("--seccomp", str(seccomp))),
        *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--proc", "/proc", *_NOTHING, "/dev"),
        *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--perms", "1777", "--size", str(settings.disk_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        # Shared memory counts as files: one limit for both.
        *("--perms", "1777", "--dir", "/tmp/.shm", "--symlink", "/tmp/.shm", "/dev/shm"),
        *("--symlink", "/proc/self/fd", "/dev/fd", "--remount-ro", "/dev"),
        *_readable(files, settings.read_only_paths),
        *("--remount-ro", "/"),
    ]


def _readable(files: PythonFiles, read_only_paths: Sequence[str]) -> Iterator[str]:
    binds = [(path, path) for path in files.visible]
    binds += [(source, name) for source, name in files.executables if not _within(name, files.visible)]
    extra = [(path, path) for path in read_only_paths]
    # bubblewrap gives the folders above a bind their modes outside, and /root is closed to other users there.
    above = {str(parent) for _, path in binds + extra for parent in PurePosixPath(path).parents} - {"/", "/tmp"}
    for folder in sorted(above):
        if not _within(folder, files.visible):
            yield from ("--perms", "0755", "--dir", folder)
    for source, path in binds:
        yield from ("--ro-bind", source, path)
    for folder in files.hidden:
        if _within(folder, files.visible):
            yield from (*_NOTHING, folder, "--remount-ro", folder)
    for source, path in extra:
        yield from ("--ro-bind", source, path)


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


_PROGRAM = Path(__file__).with_name("repl.py").read_text()
_USERS = range(61184, 65520)
"""systemd's range of dynamic users: they own no files."""
_OPEN_FILES = 128
_PENDING_SIGNALS = 256


class Launcher:
    """Starts interpreters and counts the running ones.

    bwrap: path of bubblewrap, or None to start them with this service's own rights.
    ValueError when `settings.python` is no interpreter.
    """

    def __init__(self, settings: SandboxSettings, bwrap: str | None) -> None:
        self.settings = settings
        self._bwrap = bwrap
        self._files = python_files(settings.python)
        self._rules = filter_program()
        self._living: dict[InterpreterProcess, int | None] = {}

    def launch(self) -> InterpreterProcess:
        """A new interpreter. OVERLOADED at the maximum.

        Must be called on a long-lived thread: bubblewrap exits with the thread that started it.
        """
        bound = self.settings.max_interpreters
        if len(self._living) >= bound:
            raise TrackwayError(
                ErrorCode.OVERLOADED,
                f"expected fewer than {bound} Python interpreters on this replica; "
                "release instances, wait for idle ones to expire, raise max_interpreters or add replicas",
            )
        user = self._free_user() if self._bwrap and os.geteuid() == 0 else None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = self._sandboxed(ours, theirs, user) if self._bwrap else self._bare(ours, theirs)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        os.set_blocking(process.output, False)
        self._living[process] = user
        return process

    def bury(self, process: InterpreterProcess) -> None:
        """Remove an interpreter that has exited."""
        del self._living[process]
        process.close()

    def _sandboxed(self, ours: socket.socket, theirs: socket.socket, user: int | None) -> SandboxedProcess:
        assert self._bwrap is not None
        bound = self.settings.processes
        limits = {**self._limits(), "RLIMIT_NPROC": (bound, bound)}
        with contextlib.ExitStack() as child_ends:
            info, info_end = os.pipe()
            child_ends.callback(os.close, info_end)
            rules = None if self._rules is None else _reading(self._rules)
            if rules is not None:
                child_ends.callback(os.close, rules)
            options = bubblewrap_options(self._files, self.settings, user is not None, rules, info_end)
            # The code can read its command line, and the options contain folders of this machine.
            arguments = _reading("\0".join(options).encode() + b"\0")
            child_ends.callback(os.close, arguments)
            command = ["bwrap", "--args", str(arguments), "--", *self._files.arguments]
            inherited = [theirs.fileno(), info_end, arguments, *([] if rules is None else [rules])]
            # No environment: the sandboxed code could read it.
            popen = _popen([*command, *_program(theirs, limits, user)], inherited, "/", {}, self._bwrap)
        return SandboxedProcess(popen, ours, os.fdopen(info, "rb", buffering=0))

    def _bare(self, ours: socket.socket, theirs: socket.socket) -> InterpreterProcess:
        folder = tempfile.TemporaryDirectory(prefix="trackway-python-")
        environment = {"HOME": folder.name, "TMPDIR": folder.name, "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
        command = [*self._files.arguments, *_program(theirs, self._limits(), None)]
        return InterpreterProcess(_popen(command, [theirs.fileno()], folder.name, environment), ours, folder)

    def _limits(self) -> dict[str, tuple[int, int]]:
        settings = self.settings
        memory, disk = settings.memory_mb << 20, settings.disk_mb << 20
        return {
            "RLIMIT_CPU": (settings.cpu_s, settings.cpu_s + 1),
            "RLIMIT_FSIZE": (disk, disk),
            "RLIMIT_NOFILE": (_OPEN_FILES, _OPEN_FILES),
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_SIGPENDING": (_PENDING_SIGNALS, _PENDING_SIGNALS),
            "RLIMIT_MSGQUEUE": (0, 0),
            "RLIMIT_AS": (memory, memory),
        }

    def _free_user(self) -> int:
        # The kernel counts the processes of a user, so sandboxes must not share one. Random: replicas pick too.
        taken = set(self._living.values())
        while (user := secrets.choice(_USERS)) in taken:
            pass
        return user


def _program(channel: socket.socket, limits: dict[str, tuple[int, int]], user: int | None) -> list[str]:
    return ["-c", _PROGRAM, json.dumps({"channel": channel.fileno(), "limits": limits, "user": user})]


def _popen(
    command: Sequence[str],
    inherited: Sequence[int],
    folder: str,
    environment: dict[str, str],
    executable: str | None = None,
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        executable=executable,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=inherited,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def _reading(data: bytes) -> int:
    """An open file that reads as `data`."""
    file = os.memfd_create("bubblewrap")
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file
