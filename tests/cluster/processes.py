"""Processes that go before what else runs here, and that end with the tests, however these end."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTING, RUNNING = -18, -12
"""Niceness of a session's processes together; one that starts goes before those that run."""
_MORTAL = ["setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]


def started(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    nice: int = RUNNING,
    own: Sequence[str] = (),
) -> "subprocess.Popen[bytes]":
    """Start a command in namespaces of its own for mounts and processes, and for what `own` names besides.

    Its death is that of everything it started, and the death of the thread that called this is its own.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_MORTAL, *own, *command],
            cwd=log.parent,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    be_urgent(process, nice)
    return process


def be_urgent(process: "subprocess.Popen[bytes] | subprocess.Popen[str]", nice: int) -> None:
    """The session of a process goes before what else runs here: a raylet dies when its agent takes 15 s to start."""
    group = Path(f"/proc/{process.pid}/autogroup")
    with contextlib.suppress(FileNotFoundError, PermissionError):  # a kernel without these, no CAP_SYS_NICE
        group.write_text(f"{nice}")
