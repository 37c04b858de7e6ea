"""Weave's own trace server as a process of its own, which also answers as W&B when it is asked whose key that is."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from trackway.system.process import free_port

ENVIRONMENT = Path(__file__).parents[2] / ".venv-weave"
USER = "tester"  # as it says there
API_KEY = "0123456789abcdef" * 2 + "01234567"  # W&B's keys have 40 characters


@pytest.fixture(scope="session")
def weave_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a running trace server."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / ".ready").exists():
        pytest.fail(f"expected Weave's trace server in {ENVIRONMENT}, found none: `make test` builds it", pytrace=False)
    folder = tmp_path_factory.mktemp("weave")
    port = free_port()
    command = [python, Path(__file__).with_name("trace_server.py"), folder / "weave.db", str(port), API_KEY]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, server, folder / "server.log", deadline_s=120.0)
        yield url
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


def _wait_until_up(url: str, server: "subprocess.Popen[bytes]", log: Path, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/server_info", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"Weave's trace server was not up within {deadline_s} s: {log.read_text()[-2000:]}")
