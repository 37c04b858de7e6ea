"""Runs one program and ends all its processes with it; a standalone script for Linux, standard library only.

    python -I -S program_guard.py OWNER CLEANUP HIDES COMMAND...

The program has this process's standard input and output. OWNER is the number of an open pipe: its end of file, which
follows any exit of the owner, ends the program. Orphans of the program become children of this process, so that those
that left the process group are ended too. CLEANUP is a JSON list: a command to run at the end unless the program
exits with 0, or nothing. HIDES is 1 to hide other processes from the program: it runs below `init` in a PID namespace,
with a /proc of its own.
The exit status is the program's, 128 and the signal for one that a signal ended.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2
_NO_MORE = 0xE  # MS_NOSUID | MS_NODEV | MS_NOEXEC
_GRACE_S = 2.0
_CLEANUP_S = 10.0


def main() -> int:
    """Run the program to its end, or to its owner's. Returns its exit status."""
    owner, cleanup, hides, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    is_hiding = hides == "1"
    if is_hiding:
        _enter_namespace(libc)
        command = [sys.executable, "-I", "-S", __file__, "init", *command]

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if is_hiding:
            _mount_proc(libc)

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # `preexec_fn` is safe here: the process is single-threaded.
    program = subprocess.Popen(command, preexec_fn=prepare, start_new_session=True)
    os.close(0)
    status: int | None = None
    while status is None:
        readable, _, _ = select.select([int(owner), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        status = _reaped().get(program.pid)
        if int(owner) in readable:
            break
    ended = _end_all()
    if status != 0 and json.loads(cleanup):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            null = subprocess.DEVNULL
            subprocess.run(json.loads(cleanup), stdin=null, stdout=null, stderr=null, timeout=_CLEANUP_S)
    status = ended.get(program.pid, 128 + signal.SIGKILL) if status is None else status
    return status if status >= 0 else 128 - status


def init(command: list[str]) -> int:
    """Run the command as the first process of a PID namespace. Returns its exit status, and ends what it has left."""
    try:
        program = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    os.close(0)
    while (ended := os.waitpid(-1, 0))[0] != program.pid:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)
    status = os.waitstatus_to_exitcode(ended[1])  # with this process the kernel ends all others
    return status if status >= 0 else 128 - status


def _enter_namespace(libc: ctypes.CDLL) -> None:
    """Give children a PID namespace. An ordinary user needs one of users too."""
    if libc.unshare(_CLONE_NEWPID) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _mount_proc(libc: ctypes.CDLL) -> None:
    """Mount the /proc of this PID namespace for this process."""
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    libc.umount2(b"/proc", _MNT_DETACH)  # not allowed to an ordinary user, whose /proc is covered instead
    _check(libc.mount(b"proc", b"/proc", b"proc", _NO_MORE, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _end_all() -> dict[int, int]:
    """End all processes below this one: by TERM, after a while by KILL; their exit codes by process."""
    codes: dict[int, int] = {}
    end = time.monotonic() + _GRACE_S
    _signal_all(signal.SIGTERM)
    while _below():
        codes |= _reaped()
        if time.monotonic() >= end:
            _signal_all(signal.SIGKILL)
        time.sleep(0.01)
    return codes | _reaped()


def _signal_all(number: int) -> None:
    for pid in _below():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reaped() -> dict[int, int]:
    """The exit codes of children that have exited."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _below() -> list[int]:
    """All processes below this one that have not exited."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    below, found = {os.getpid()}, True
    while found:
        found = False
        for pid, parent in parents.items():
            if parent in below and pid not in below:
                below.add(pid)
                found = True
    return sorted(below - {os.getpid()})


if __name__ == "__main__":
    sys.exit(init(sys.argv[2:]) if sys.argv[1] == "init" else main())
