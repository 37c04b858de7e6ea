"""`trackway console` as a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.console.example_run import write_run


@pytest.mark.slow
def test_it_serves_its_folder_at_a_low_priority_without_torch_until_it_is_stopped(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs")
    command = [sys.executable, "-m", "trackway.deploy.cli", "console", "--outputs", "outputs", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    try:
        document = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(base_url=document["console"], transport=transport, timeout=30) as client:
            page = client.get("").raise_for_status().text
            runs = client.get("api/runs").json()["runs"]
        niceness = psutil.Process(process.pid).nice()
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.terminate()
        status = process.wait(30)
        process.stdout.close()

    assert ([run["key"] for run in runs], "page/app.js" in page, status) == (["tidy"], True, 0)
    assert niceness == min(19, os.nice(0) + 10)
    assert "libtorch" not in loaded  # which alone takes longer than the console has to open
