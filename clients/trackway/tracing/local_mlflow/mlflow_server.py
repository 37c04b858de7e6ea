"""Supervisor of the local MLflow server of a database: starts it, publishes its address, stops it when it is unused.

A dedicated server that dies is restarted on its port, a bounded number of times. A shared server is not restarted: its
users start the next one when they need it. This is a separate program that imports only the standard library, because
it runs as long as the server.
Its files are in the folder `<database>.server`:

    lock           locked by the supervisor, so there is at most one. The text identifies it
    users          share-locked by every process that uses the server; the kernel releases it when a process dies
    address.json   address of the server while it answers. Readable by its owner only
    failed         why the last start failed, or why the server stopped
    server.log     output of supervisor and server
"""

import argparse
import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NICENESS = 5
"""Niceness of the server once it answers. 19 is the lowest priority."""
START_DEADLINE_S = 120.0
END_DEADLINE_S = 8.0
STARTS = 2
"""Attempts to start on a free port, which may be taken before the server binds it."""
RESTARTS = 6
"""Consecutive restarts of a server that died, after pauses of 1, 2, 4, ... s."""
STEADY_S = 60.0
"""Seconds of service after which the count of consecutive restarts is reset."""
TAKEN = 3
"""Exit status: another supervisor holds the lock."""
_MARK = "TRACKWAY_MLFLOW_DATABASE"


@dataclass(frozen=True)
class ServerFiles:
    """Paths of the files next to a database."""

    database: Path

    @property
    def folder(self) -> Path:
        """Folder of all files except the database and the artifacts."""
        return self.database.with_name(self.database.name + ".server")

    @property
    def lock(self) -> Path:
        """Locked by the supervisor."""
        return self.folder / "lock"

    @property
    def users(self) -> Path:
        """Share-locked by every user."""
        return self.folder / "users"

    @property
    def address(self) -> Path:
        """JSON: where the server answers."""
        return self.folder / "address.json"

    @property
    def failed(self) -> Path:
        """Text file with the reason of the last failed start or restart."""
        return self.folder / "failed"

    @property
    def log(self) -> Path:
        """Output of supervisor and server."""
        return self.folder / "server.log"

    @property
    def artifacts(self) -> Path:
        """Folder of artifacts, which is the default of `mlflow server` in the database's folder."""
        return self.database.with_name("mlartifacts")


def flocked(path: Path, exclusive: bool) -> int | None:
    """A descriptor that holds the file's lock until it is closed, or None when the lock is taken.

    Apart from `trackway.system.files`, because these locks are shared by users and inherited by the supervisor.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def main() -> int:
    """Run a server until it is unused or SIGTERM arrives; exit status 0 unless the server failed."""
    parser = argparse.ArgumentParser(description="Run the local MLflow server of a database.")
    parser.add_argument("database", type=Path)
    parser.add_argument("--port", type=int, help="default: any free one")
    parser.add_argument(
        "--linger", type=float, help="seconds to keep running after the last user; default: until SIGTERM"
    )
    parser.add_argument("--lock-fd", type=int, help="inherited descriptor that holds the lock")
    parser.add_argument("--detach", action="store_true", help="continue in the background")
    options = parser.parse_args()
    files = ServerFiles(options.database)
    lock = flocked(files.lock, exclusive=True) if options.lock_fd is None else options.lock_fd
    if lock is None:
        print(f"another MLflow server for {files.database} is already running", flush=True)
        return TAKEN
    os.set_inheritable(lock, False)
    os.chdir(files.folder)  # `-m` would import a user's own mlflow.py from the working directory
    if options.detach and os.fork():
        return 0
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "shared": options.linger is not None}).encode(), 0)
    return _keep(files, options.port, options.linger)


def _keep(files: ServerFiles, port: int | None, linger_s: float | None) -> int:
    files.address.unlink(missing_ok=True)
    files.failed.unlink(missing_ok=True)
    _end_orphans(files)
    try:
        _use_wal(files.database)
        reason = _serve(files, port, linger_s)
    except (OSError, sqlite3.Error) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        return 0
    print(reason, flush=True)
    files.failed.write_text(reason)
    return 1


def _serve(files: ServerFiles, port: int | None, linger_s: float | None) -> str | None:
    """Run the server with restarts. Returns the reason why it failed. None when it is no longer needed."""
    failures, allowed = 0, STARTS if port is None else 1
    while True:
        healthy_at = None
        with _port(port) as chosen, _server(files, chosen) as server:
            if _wait_until_healthy(server, chosen):
                healthy_at = time.monotonic()
                _lower_priority(server)
                _publish(files, chosen)
                if not _exits(server, files, linger_s) or linger_s is not None:
                    return None
        if healthy_at is not None:
            allowed = RESTARTS + 1
            failures = 0 if time.monotonic() - healthy_at >= STEADY_S else failures
        failures += 1
        if failures >= allowed:
            often = f", and {RESTARTS} restarts in a row did not help" if allowed > STARTS else ""
            return f"the server ended, or did not answer in time{often}"
        if allowed > STARTS:
            _pause_before_restart(server, failures)


def _pause_before_restart(server: "subprocess.Popen[bytes]", failures: int) -> None:
    pause_s = 2.0 ** (failures - 1)
    often = f"restart {failures} of {RESTARTS} in a row"
    print(f"the MLflow server ended with status {server.returncode}; {often} in {pause_s:g} s", flush=True)
    _on_end_signals(_end)
    time.sleep(pause_s)


def _use_wal(database: Path) -> None:
    """In sqlite's default mode one slow reader blocks every writer."""
    database.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode=wal")


@contextlib.contextmanager
def _port(port: int | None) -> Iterator[int]:
    """The port, or a free one that is bound without listening until the server binds it, so that it is not taken."""
    if port is not None:
        yield port
        return
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def _server(files: ServerFiles, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `mlflow server`, which creates and migrates its database. It is stopped with its children after the block."""
    program = str(Path(__file__).with_name("server_process.py"))
    command = [sys.executable, "-P", program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{files.database}", "--artifacts-destination", str(files.artifacts)]
    command += ["--uvicorn-opts=--no-access-log"]  # a line per request would fill the disk
    process = subprocess.Popen(command, env=_environment(files), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        _on_end_signals(_end)
        yield process
    finally:
        received: list[int] = []
        _on_end_signals(lambda number, _: received.append(number))
        files.address.unlink(missing_ok=True)
        _end_group(process)
        if received:
            _end()


def _end(*_: object) -> None:
    sys.exit(0)


def _on_end_signals(action: Callable[..., object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, action)


def _environment(files: ServerFiles) -> dict[str, str]:
    """The environment without MLflow's variables, which are meant for clients or other servers.

    Job execution is disabled, which saves nine processes and 1.6 GB. Price lists are not fetched from the internet: for
    the first span with a model's name MLflow would do so, and store no span until its attempts have ended.
    """
    kept = {key: value for key, value in os.environ.items() if not key.lstrip("_").startswith("MLFLOW_")}
    fixed = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    fixed |= {"MLFLOW_MODEL_CATALOG_URI": ""}
    return {**kept, **fixed, _MARK: str(files.database)}


def _wait_until_healthy(server: "subprocess.Popen[bytes]", port: int) -> bool:
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end and server.poll() is None:
        if healthy(port):
            return True
        time.sleep(0.2)
    return False


def _lower_priority(server: "subprocess.Popen[bytes]") -> None:
    """Lower the server's priority, so that storing traces does not slow down rollouts on a machine with few cores."""
    our_niceness = os.getpriority(os.PRIO_PROCESS, 0)  # only root may go below it
    os.setpriority(os.PRIO_PGRP, server.pid, max(NICENESS, our_niceness))
    with contextlib.suppress(OSError):  # Linux shares the cores out by session first, where that is built in: sched(7)
        Path(f"/proc/{server.pid}/autogroup").write_text(str(NICENESS))


def healthy(port: int | None) -> bool:
    """Return whether a server on this port of the machine answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _publish(files: ServerFiles, port: int) -> None:
    partial = files.address.with_suffix(".partial")
    try:
        partial.touch(mode=0o600)
        partial.write_text(json.dumps({"uri": f"http://127.0.0.1:{port}"}))
        partial.rename(files.address)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _exits(server: "subprocess.Popen[bytes]", files: ServerFiles, linger_s: float | None) -> bool:
    """Wait for the server: True once it has exited.

    False when its database file was replaced, or when it has been unused for `linger_s` seconds.
    """
    opened = files.database.stat().st_ino
    last_used = time.time()
    while _keeps_running(server, 1.0 if linger_s is None else min(1.0, linger_s / 4)):
        try:
            if files.database.stat().st_ino != opened:
                return False
            unused = None if linger_s is None else flocked(files.users, exclusive=True)
            if unused is None or linger_s is None:
                last_used = time.time()
            elif time.time() - max(last_used, files.users.stat().st_mtime) < linger_s:
                os.close(unused)
            else:
                return False  # still locked: a new user waits, then starts a new server
        except FileNotFoundError:
            return False
    return True


def _keeps_running(server: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the server's process group; kill it after the deadline."""
    end = time.monotonic() + END_DEADLINE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_DEADLINE_S)


def _end_orphans(files: ServerFiles) -> None:
    """Kill servers left by a supervisor that was killed, identified by their environment (where there is a /proc)."""
    mark = f"{_MARK}={files.database}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
