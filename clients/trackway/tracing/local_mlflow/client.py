"""A local MLflow database as a server that takes spans: one per database, started by whoever comes first.

MLflow takes spans over HTTP only, and workers that each open a new sqlite file collide. So the processes that use one
database share one server: its keeper (mlflow_server.py) holds a lock beside the database, says there where the server
answers, and ends it a while after its last user. A local file belongs to one machine.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import httpx

from trackway.tracing.local_mlflow import mlflow_server
from trackway.tracing.local_mlflow.mlflow_server import START_DEADLINE_S, ServerFiles, flocked
from trackway.tracing.local_mlflow.uri import local_database

LINGER_S = 60.0
"""How long a server outlives its last user."""
RETRY_A_FAILED_START_S = 60.0
"""Until then a start that failed is not tried again, by any process: each try costs seconds of CPU."""
_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 5.0

_guard = threading.Lock()
_servers: dict[Path, "_LocalServer"] = {}


class LocalMlflowError(Exception):
    """The local server cannot be had; the message says why, with the end of its log."""


def server_uri(uri: str, deadline_s: float = START_DEADLINE_S, linger_s: float | None = None) -> str:
    """The address of the server behind an MLflow tracking URI, without a trailing slash.

    For a local database it waits up to `deadline_s` seconds for the server, which it starts if need be; while that
    answers, further calls cost microseconds. A server that this call starts outlives its last user by `linger_s`
    seconds, by default `LINGER_S`.

    Raises:
        ValueError: the URI is neither a server's nor that of a local database.
        LocalMlflowError: the server did not start.
        OSError: the database's folder cannot be written.
    """
    database = _pinned(uri)
    if database is None:
        return uri.rstrip("/")
    with _guard:
        server = _servers.setdefault(database, _LocalServer(ServerFiles(database)))
    return server.uri(deadline_s, LINGER_S if linger_s is None else linger_s)


@cache
def _pinned(uri: str) -> Path | None:
    """What a relative URI meant at first, whatever the working directory is later."""
    return local_database(uri)


def check(uri: str) -> None:
    """Raise ValueError when spans sent to this URI could never arrive; starts nothing and asks nobody."""
    database = local_database(uri)
    if database is not None and _address(ServerFiles(database)) is None:
        _check_installed(database)


def answers(uri: str) -> bool:
    """Whether spans can be sent to this URI without waiting for a local server to start."""
    database = local_database(uri)
    return database is None or _address(ServerFiles(database)) is not None


def keeper_command(database: Path, port: int | None = None, linger_s: float | None = None) -> list[str]:
    """The command that keeps a server in the foreground; without `linger_s` until it is told to end."""
    command = [sys.executable, "-I", mlflow_server.__file__, str(database)]
    command += [] if port is None else ["--port", str(port)]
    return command if linger_s is None else [*command, "--linger", str(linger_s)]


def make_way(database: Path, deadline_s: float = 30.0) -> ServerFiles:
    """End the shared server of this database, so that one of another kind may start; its users will find that one.

    Raises:
        LocalMlflowError: the server is not a shared one, or does not end within `deadline_s` seconds.
    """
    files = _prepared(database)
    end = time.monotonic() + deadline_s
    told = False
    while True:
        lock = flocked(files.lock, exclusive=True)
        if lock is not None:
            os.close(lock)
            return files
        keeper = _json(files.lock)
        if keeper.get("shared") is False or time.monotonic() > end:
            raise LocalMlflowError(
                f"an MLflow server for {database} runs already at {_address(files) or '(it is starting)'}: process "
                f"{keeper.get('pid')}; use that one, or stop what started it"
            )
        if not told and _is_keeper(keeper.get("pid")):
            told = True
            os.kill(int(str(keeper["pid"])), signal.SIGTERM)
        time.sleep(_POLL_S)


class _LocalServer:
    """What this process knows about the server of one database."""

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._guard = threading.Lock()
        self._users: int | None = None
        self._known = ""
        self._seen: tuple[int, int] | None = None

    def uri(self, deadline_s: float, linger_s: float) -> str:
        """As `server_uri`."""
        with self._guard:
            if self._seen is None or self._seen != _identity(self._files) or not _kept(self._files):
                self._seen = None
                self._known = self._find(time.monotonic() + deadline_s, linger_s)
            return self._known

    def _find(self, end: float, linger_s: float) -> str:
        _prepared(self._files.database)
        self._attach(end)
        started = False
        while time.monotonic() < end:
            seen, address = _identity(self._files), _address(self._files)
            if address is not None and _healthy(address):
                self._seen = seen
                return address
            lock = flocked(self._files.lock, exclusive=True)
            if lock is not None:
                try:
                    self._check_startable(started)
                    _start(self._files, lock, linger_s)
                    started = True
                finally:
                    os.close(lock)
            time.sleep(_POLL_S)
        raise LocalMlflowError(
            f"the MLflow server for {self._files.database} did not answer in time; the end of {self._files.log}:\n"
            + _tail(self._files.log)
        )

    def _attach(self, end: float) -> None:
        """Be a user until this process ends; a keeper that is just ending its server makes us wait for that."""
        while (users := flocked(self._files.users, exclusive=False)) is None:
            if time.monotonic() > end:
                raise LocalMlflowError(f"{self._files.users} stays locked by a server that is ending")
            time.sleep(_POLL_S)
        os.utime(users)
        if self._users is not None:
            os.close(self._users)
        self._users = users

    def _check_startable(self, started: bool) -> None:
        files = self._files
        _check_installed(files.database)
        reason = _text(files.failed)
        if started or (reason and time.time() - files.failed.stat().st_mtime < RETRY_A_FAILED_START_S):
            raise LocalMlflowError(
                f"the MLflow server for {files.database} did not start: {reason or 'its keeper is gone'}; "
                f"the end of {files.log}:\n{_tail(files.log)}"
            )


def _check_installed(database: Path) -> None:
    if importlib.util.find_spec("mlflow") is None:
        raise ValueError(
            f"{database} needs a local MLflow server, and mlflow is not installed in {sys.executable}: "
            "pip install 'trackway[mlflow]', or set MLFLOW_TRACKING_URI to a server's http(s) address"
        )


def _prepared(database: Path) -> ServerFiles:
    files = ServerFiles(database)
    files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return files


def _start(files: ServerFiles, lock: int, linger_s: float) -> None:
    """Start a keeper that takes over our lock and outlives us."""
    os.ftruncate(lock, 0)
    files.address.unlink(missing_ok=True)
    command = [*keeper_command(files.database, linger_s=linger_s), "--lock-fd", str(lock), "--detach"]
    with files.log.open("wb") as log:
        subprocess.run(
            command,
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=30.0,
            check=False,
        )


def _kept(files: ServerFiles) -> bool:
    """Whether a keeper holds the lock."""
    try:
        lock = flocked(files.lock, exclusive=False)
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is None


def _address(files: ServerFiles) -> str | None:
    """Where the server answers; what a keeper that was killed left there does not count."""
    uri = _json(files.address).get("uri")
    return str(uri) if uri and _kept(files) else None


def _identity(files: ServerFiles) -> tuple[int, int] | None:
    """Tells one server's address from the next one's."""
    try:
        status = files.address.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=_HEALTH_TIMEOUT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _is_keeper(pid: object) -> bool:
    """Whether the process is one; where there is no /proc we believe it."""
    if not isinstance(pid, int):
        return False
    command = Path(f"/proc/{pid}/cmdline")
    return Path(mlflow_server.__file__).name in _text(command) if Path("/proc/self").exists() else True


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(_text(path))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(_text(log).splitlines()[-lines:])


def _forget_after_fork() -> None:
    """A lock that another thread held while the process forked would stay locked in the child."""
    global _guard
    _guard = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
