"""A PostgreSQL of Debian's package for the length of a block: its own cluster, on a free port of loopback."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trackway.system import free_port


@contextlib.contextmanager
def postgres_store() -> Iterator[str]:
    """A URI that `mlflow server --backend-store-uri` takes."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs or importlib.util.find_spec("psycopg2") is None:
        raise SystemExit("needs Debian's postgresql and psycopg2 (`make bench` installs the latter)")
    folder = Path(tempfile.mkdtemp(prefix="trackway-postgres-"))
    port = free_port()
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder}"
    control = [str(programs[-1] / "pg_ctl"), "-D", str(folder / "data"), "-w", "-l", str(folder / "log")]
    try:
        if os.geteuid() == 0:  # initdb refuses root
            shutil.chown(folder, "postgres", "postgres")
        init = [str(programs[-1] / "initdb"), "-D", str(folder / "data"), "--auth=trust", "--username=postgres"]
        _as_owner([*init, "--encoding=UTF8", "--no-instructions"])
        _as_owner([*control, "-o", options, "start"])
        try:
            _as_owner([str(programs[-1] / "createdb"), "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "mlflow"])
            yield f"postgresql+psycopg2://postgres@127.0.0.1:{port}/mlflow"
        finally:
            _as_owner([*control, "-m", "fast", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_owner(command: list[str]) -> None:
    prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    subprocess.run([*prefix, *command], check=True, capture_output=True, timeout=120, cwd="/")
