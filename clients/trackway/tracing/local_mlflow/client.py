"""The shared MLflow server of a local database, started by its first user, and the database that a tracking URI names.

MLflow accepts spans over HTTP only, and workers that each open a new sqlite file collide. The processes that use a
database therefore share one server. Its supervisor (mlflow_server.py) holds a lock next to the database, publishes the
server's address there, and stops the server some time after its last user. A local database is for one machine only.
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
from urllib.parse import unquote, urlsplit

from trackway.system import log_tail, without_secrets
from trackway.tracing.local_mlflow import mlflow_server
from trackway.tracing.local_mlflow.mlflow_server import START_DEADLINE_S, ServerFiles, flocked


def local_database(uri: str) -> Path | None:
    """The sqlite file of a local URI (`sqlite:///file.db`, a folder, `file:///folder`), None for a server's address.

    Raises:
        ValueError: anything else, or a folder in MLflow's old file format.
    """
    scheme, separator, rest = uri.partition(":")
    if scheme in ("http", "https"):
        return None
    if scheme == "sqlite":
        return _sqlite_file(uri)
    if scheme == "file":
        return _in_folder(Path(unquote(urlsplit(uri).path)))
    if separator and rest.startswith("//"):
        raise ValueError(
            f"MLFLOW_TRACKING_URI: expected http(s)://..., sqlite:///file.db or a folder, got {uri!r}; "
            f"run `mlflow server --backend-store-uri {uri}` and give its address"
        )
    return _in_folder(Path(uri))


def _sqlite_file(uri: str) -> Path:
    """Parse a URI as SQLAlchemy does: three slashes and a path, which is absolute when it begins with a fourth."""
    path = uri.removeprefix("sqlite:///").partition("?")[0]
    if path in ("", ":memory:") or not uri.startswith("sqlite:///"):
        raise ValueError(f"MLFLOW_TRACKING_URI: expected sqlite:///file.db, got {uri!r}: workers share a file only")
    return Path(path).expanduser().resolve()


def _in_folder(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if folder.is_file():
        raise ValueError(f"MLFLOW_TRACKING_URI: expected a folder, got the file {folder}; write sqlite:///{folder}")
    if any(folder.glob("*/meta.yaml")):
        raise ValueError(
            f"{folder} contains runs in MLflow's old file format, which cannot store spans; migrate them with "
            f"`mlflow migrate-filestore --source {folder} --target sqlite:///{folder}.db` "
            f"and set MLFLOW_TRACKING_URI=sqlite:///{folder}.db"
        )
    return folder / "mlflow.db"


LINGER_S = 60.0
"""Seconds that a server keeps running after its last user."""
RETRY_A_FAILED_START_S = 60.0
"""Seconds until a failed start is retried by any process. Each attempt costs seconds of CPU."""
_POLL_S = 0.1

_guard = threading.Lock()
_servers: dict[Path, "_LocalServer"] = {}


class LocalMlflowError(Exception):
    """The local server is not available. The message has the reason and the end of its log."""


def server_uri(uri: str, deadline_s: float = START_DEADLINE_S, linger_s: float | None = None) -> str:
    """The address of the server behind an MLflow tracking URI, without a trailing slash.

    For a local database, the call starts the server if needed and waits up to `deadline_s` seconds for it. Later calls
    take microseconds while the server runs. A server started by this call keeps running for `linger_s` seconds after
    its last user (default `LINGER_S`).

    Raises:
        ValueError: the URI is neither a server's nor a local database's.
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
    """The local database of a URI, cached so that a later change of the working directory has no effect."""
    return local_database(uri)


def check(uri: str) -> None:
    """Raise ValueError if spans could never be sent to this URI. Starts no server and makes no request."""
    database = local_database(uri)
    if database is not None and _address(ServerFiles(database)) is None:
        _check_installed(database)


def answers(uri: str) -> bool:
    """Return whether spans can be sent to this URI without waiting for a local server to start."""
    database = local_database(uri)
    return database is None or _address(ServerFiles(database)) is not None


def server_command(database: Path, port: int | None = None, linger_s: float | None = None) -> list[str]:
    """The command that runs a server in the foreground. Without `linger_s`, until it receives SIGTERM."""
    command = [sys.executable, "-I", mlflow_server.__file__, str(database)]
    command += [] if port is None else ["--port", str(port)]
    return command if linger_s is None else [*command, "--linger", str(linger_s)]


def stop_shared_server(database: Path, deadline_s: float = 30.0) -> ServerFiles:
    """Stop the shared server of this database so that another can start. Its users will find the new server.

    Raises:
        LocalMlflowError: the server is not a shared one, or does not exit within `deadline_s` seconds.
    """
    files = _prepared(database)
    end = time.monotonic() + deadline_s
    signalled = False
    while True:
        lock = flocked(files.lock, exclusive=True)
        if lock is not None:
            os.close(lock)
            return files
        holder = _json(files.lock)
        if holder.get("shared") is False or time.monotonic() > end:
            raise LocalMlflowError(
                f"an MLflow server for {database} is already running at {_address(files) or '(starting)'}: process "
                f"{holder.get('pid')}; use it, or stop the program that started it"
            )
        if not signalled and _is_our_process(holder.get("pid")):
            signalled = True
            os.kill(int(str(holder["pid"])), signal.SIGTERM)
        time.sleep(_POLL_S)


class _LocalServer:
    """This process's state of the server of one database."""

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._guard = threading.Lock()
        self._users: int | None = None
        self._known = ""
        self._seen: tuple[int, int] | None = None

    def uri(self, deadline_s: float, linger_s: float) -> str:
        """Do `server_uri`."""
        with self._guard:
            if self._seen is None or self._seen != _identity(self._files) or not _is_held(self._files):
                self._seen = None
                self._known = self._find(time.monotonic() + deadline_s, linger_s)
            return self._known

    def _find(self, end: float, linger_s: float) -> str:
        _prepared(self._files.database)
        self._attach(end)
        started = False
        while time.monotonic() < end:
            seen, address = _identity(self._files), _address(self._files)
            if address is not None and mlflow_server.healthy(urlsplit(address).port):
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
            + log_tail(self._files.log)
        )

    def _attach(self, end: float) -> None:
        """Register as a user until this process exits. Waits for a server that is being stopped."""
        while (users := flocked(self._files.users, exclusive=False)) is None:
            if time.monotonic() > end:
                raise LocalMlflowError(f"{self._files.users} stays locked by a server that is stopping")
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
                f"the end of {files.log}:\n{log_tail(files.log)}"
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
    """Start a supervisor that inherits the lock and outlives this process."""
    os.ftruncate(lock, 0)
    files.address.unlink(missing_ok=True)
    command = [*server_command(files.database, linger_s=linger_s), "--lock-fd", str(lock), "--detach"]
    with files.log.open("wb") as log:
        subprocess.run(
            command,
            pass_fds=(lock,),
            env=without_secrets(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            timeout=30.0,
            check=False,
        )


def _is_held(files: ServerFiles) -> bool:
    """Return whether a supervisor holds the lock."""
    try:
        lock = flocked(files.lock, exclusive=False)
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is None


def _address(files: ServerFiles) -> str | None:
    """The server's address, or None if it was left by a supervisor that was killed."""
    uri = _json(files.address).get("uri")
    return str(uri) if uri and _is_held(files) else None


def _identity(files: ServerFiles) -> tuple[int, int] | None:
    """Identity of the address file, which distinguishes successive servers."""
    try:
        status = files.address.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_our_process(pid: object) -> bool:
    """Return whether the process is a supervisor. Assumed where there is no /proc."""
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


def _forget_after_fork() -> None:
    """Replace the lock in a forked child, where it could stay locked by a thread of the parent."""
    global _guard
    _guard = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
