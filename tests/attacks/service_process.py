"""A service in a process of its own, under plain uvicorn, so that what ends a process ends that one."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ServiceProcess:
    """A running service."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    http: httpx.Client


@contextmanager
def service_process(
    service: str, folder: Path, settings: Mapping[str, str], files: int | None = None, deadline_s: float = 60.0
) -> Iterator[ServiceProcess]:
    """`uvicorn --factory trackway.<service>.app:create_app`; `files` bounds its file descriptors."""
    log = folder / f"{service}.log"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {f"TRACKWAY_{name.upper()}": value for name, value in settings.items()}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--factory", f"trackway.{service}.app:create_app", "--port", "0"],
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": path, **given},
            preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )
    try:
        port = _port(process, log, deadline_s)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield ServiceProcess(port, process, log, http)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> int:
    end = time.monotonic() + deadline_s
    while process.poll() is None and time.monotonic() < end:
        for line in log.read_text().splitlines():
            if "Uvicorn running on" in line:
                return int(httpx.URL(line.split()[4]).port or 0)
        time.sleep(0.05)
    raise AssertionError(f"the service did not start: {log.read_text()}")
