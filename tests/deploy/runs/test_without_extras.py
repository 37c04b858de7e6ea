"""Commands that look at runs and services need no extra: `pip install trackway` is enough."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trackway.deploy.deployment.record import Deployment
from trackway.run_config import compose
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.trainer import RunState

pytestmark = pytest.mark.slow  # five real services

SERVICES = ("rollout", "agent", "tools", "reward", "trainer")
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
from trackway.deploy.cli import main
main()
"""


@cache
def of_extras() -> set[str]:
    """Top-level modules that an installation without extras lacks."""
    installed: set[str] = set()
    left = [Requirement(line) for line in requires("trackway") or []]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name not in installed and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            installed.add(name)
            left += [Requirement(line) for line in requires(name) or []]
    known = packages_distributions()
    kept = {canonicalize_name("trackway"), *installed}
    return {module for module, names in known.items() if not kept & set(map(canonicalize_name, names))}


def out(*words: str) -> str:
    """The output of a command that must succeed where those modules are missing."""
    missing = ",".join(sorted(of_extras() - {"_distutils_hack", "pkg_resources"}))
    command = [sys.executable, "-c", PROGRAM, missing, *words]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_modules_that_are_missing_are_those_of_extras() -> None:
    missing = of_extras()
    assert {"hydra", "omegaconf", "fastapi", "ray", "torch", "transformers", "pyarrow", "mlflow", "yaml"} <= missing
    assert not {"httpx", "pydantic", "pydantic_core", "typer", "rich", "opentelemetry", "trackway"} & missing


def test_attached_services_are_looked_at_without_extras(there: Deployment, folder: RunFolder) -> None:
    folder.move(RunState.RUNNING)
    where = ("--outputs", str(there.outputs))

    statuses = json.loads(out("status", "--json", *where))
    assert {status["service"]: status["status"] for status in statuses} == dict.fromkeys(SERVICES, "RUNNING")
    assert folder.name in out("runs", "list", *where)
    assert f"run {folder.name}" in out("runs", "show", folder.name, *where)
    assert out("why", folder.name, *where).startswith(f"run {folder.name} is running, after step 0\n")


def test_a_folder_of_runs_is_read_and_cleaned_without_extras(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mine")
    run.create(compose([]), ServiceUrls(agent_url="", tools_url="", weights_url=""))
    run.move(RunState.RUNNING)
    run.move(RunState.FINISHED)
    (tmp_path / "weights").mkdir()
    where = ("--outputs", str(tmp_path))

    assert '"state": "finished"' in out("runs", "list", "--json", *where)
    assert out("clean", "--yes", *where) == f"removed 0 B from {tmp_path}\n"
    assert not (tmp_path / "weights").exists() and run.exists
