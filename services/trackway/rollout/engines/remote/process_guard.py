"""Runs one command and kills its process tree when the owner exits; a standalone script, standard library only.

    python -I -S process_guard.py FOLDER COMMAND...

The owner holds both pipes. Standard input: a line "SECONDS" stops the command (TERM, then KILL after so many seconds);
end of file, which follows any exit of the owner, does the same. Standard output: the command's exit status, when it
has exited. The command's own output goes to standard error. FOLDER, which may be "", is removed at the end.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_GRACE_WITHOUT_OWNER_S = 5.0
_LINGER_S = 2.0  # time for a child process to notice that its parent exited, and to free shared memory
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the command until it exits or the owner stops it, then kill its remaining processes."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def die_with_guard() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # `preexec_fn` is safe here: the process is single-threaded.
    command = subprocess.Popen(
        sys.argv[2:],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=die_with_guard,
        process_group=0,
    )
    while command.poll() is None:
        readable, _, _ = select.select([sys.stdin, woken], [], [])
        if woken in readable and signal.SIGTERM in os.read(woken, 4096):
            _end(command, _GRACE_WITHOUT_OWNER_S)
        elif sys.stdin in readable:
            _end(command, float(sys.stdin.readline() or _GRACE_WITHOUT_OWNER_S))
    _tell(command.returncode)
    _end_group(command.pid)
    if sys.argv[1]:
        shutil.rmtree(sys.argv[1], ignore_errors=True)


def _end(command: "subprocess.Popen[bytes]", grace_s: float) -> None:
    _signal_group(command.pid, signal.SIGTERM)
    try:
        command.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(command.pid, signal.SIGKILL)
        command.wait()


def _end_group(group: int) -> None:
    """Kill the children that the command left behind."""
    _signal_group(group, signal.SIGTERM)
    end = time.monotonic() + _LINGER_S
    while _signal_group(group, 0) and time.monotonic() < end:
        time.sleep(0.02)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Return whether the process group still exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _tell(status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner has exited
        os.write(1, str(status).encode())


if __name__ == "__main__":
    main()
