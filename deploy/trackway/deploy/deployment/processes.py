"""Long-lived child processes: detached from the terminal, identified by start time, stopped with their descendants.

`answers` says whether the server of one is ready.
"""

import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import httpx
import psutil
from pydantic import BaseModel

from trackway.system import log_tail
from trackway.system.process import UserError

Report = Callable[[str, str], None]
"""Called with a part's name and state. The last state is `ready` or `stopped`, of spans `sent` or `left on disk`, of a
check `ready`, `with problems` or `not checked`."""


@cache
def tls() -> ssl.SSLContext:
    """The TLS settings of this process: without them httpx reads all certificates for each request, http:// too."""
    return httpx.create_ssl_context(trust_env=False)


def answers(url: str, headers: dict[str, str] | None = None) -> bool:
    """Return whether a GET is answered with 200."""
    try:
        return httpx.get(url, headers=headers, timeout=5.0, trust_env=False, verify=tls()).status_code == 200
    except httpx.TransportError:
        return False


_children: list[subprocess.Popen[bytes]] = []
"""References that prevent Python's ResourceWarning: the children outlive this process on purpose."""


class ProcessRecord(BaseModel):
    """A started process. The start time distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    started: float
    log: Path

    def find(self) -> psutil.Process | None:
        """The process if it is still running, else None."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0
            return process if same and _lives(process) else None
        except psutil.NoSuchProcess:
            return None


def start(name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> ProcessRecord:
    """Start a process with this environment and output to `log`, in its own session: Ctrl-C does not reach it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children.append(process)
    return ProcessRecord(name=name, pid=process.pid, started=psutil.Process(process.pid).create_time(), log=log)


def check_alive(record: ProcessRecord) -> None:
    """Raise UserError with the end of the log if the process has exited."""
    if record.find() is None:
        raise UserError(f"{record.name} exited during start-up; the end of {record.log}:\n{log_tail(record.log)}")


RAY_ITSELF = ("raylet", "gcs_server", "ray-dashboard", "ray::RuntimeEnv", "ray::DashboardAg", "ray::ServeContro")
"""Names of Ray's own processes begin so. They have nothing to finish, and end 8 s after SIGTERM or later."""


def stop_tree(record: ProcessRecord, grace_s: float = 8.0) -> None:
    """Terminate a process and all its descendants. Kill those that remain after `grace_s` seconds.

    Of a Ray node, the node itself is killed as soon as its workers have ended.
    """
    main = record.find()
    if main is not None:
        tree = [*main.children(recursive=True), main]
        ray = [process for process in tree if _name(process).startswith(RAY_ITSELF)]
        awaited = [process for process in tree if process not in ray and not (ray and process == main)]
        _signal(tree, kill=False)
        _wait_until_ended(awaited, grace_s)
        _signal(tree, kill=True)
        _wait_until_ended(tree, 5.0)
    for child in _children:
        child.poll()


def _wait_until_ended(tree: Sequence[psutil.Process], timeout_s: float) -> None:
    """Wait until the processes have ended. Their parents may not have collected them."""
    end = time.monotonic() + timeout_s
    while any(_lives(process) for process in tree) and time.monotonic() < end:
        time.sleep(0.05)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _signal(processes: Sequence[psutil.Process], kill: bool) -> None:
    for process in processes:
        try:
            process.kill() if kill else process.terminate()
        except psutil.NoSuchProcess:
            continue
