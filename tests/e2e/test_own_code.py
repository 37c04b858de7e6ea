"""The promise: changed own code reaches its service and no other, and a cluster gets own code as a working_dir."""

import copy
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from trackway.clients import ToolsClient, run
from trackway.clients.http_client import resolve_token
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi, service_statuses
from trackway.wire.errors import TrackwayError
from trackway.wire.tools import OneShotRequest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOOL = '''
from trackway.tools import function_tool

@function_tool
def own_version() -> str:
    """Say which version this is."""
    return "{}"
'''


@pytest.fixture
def shipped(deployment: Deployment) -> Iterator[dict[str, Any]]:
    """The session's Serve config, which is deployed again at the end."""
    before = deployment.serve_config
    yield before
    old = pids(deployment)["tools"]
    deployment.serve_config = before
    deployment.save()
    ServeApi(deployment.dashboard_url, deployment.token).deploy(before)
    until(lambda: (now := pids(deployment).get("tools")) and now.isdisjoint(old), 240.0)


def pids(deployment: Deployment) -> dict[str, set[int]]:
    """The processes of each service."""
    return {
        status.service: {replica.health.pid for replica in status.replicas} for status in service_statuses(deployment)
    }


def answer(deployment: Deployment) -> str | None:
    """What the own tool says; None while there is none."""
    client = ToolsClient(f"{deployment.base_url}/tools", token=resolve_token())
    with suppress(TrackwayError):
        return run(client.one_shot("own_version", OneShotRequest(arguments={}))).text
    return None


def test_a_changed_tool_file_is_served_and_no_other_service_restarts(
    deployment: Deployment, shipped: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "own_tools.py"
    file.write_text(TOOL.format("first"))
    deployment.serve_config = serve_config.with_options(shipped, "tools", {"function_tool_path": str(file)})
    deployment.save()
    others = {name: found for name, found in pids(deployment).items() if name != "tools"}
    command = [sys.executable, "-m", "trackway.deploy.cli", "up", "--reload", "--outputs", str(deployment.outputs)]
    watch = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        until(lambda: answer(deployment) == "first", 240.0)
        file.write_text(TOOL.format("second"))
        until(lambda: answer(deployment) == "second", 240.0)
        assert {name: pids(deployment)[name] for name in others} == others
    finally:
        os.kill(watch.pid, signal.SIGINT)
        ended = watch.wait(60)

    assert ended == 0
    assert answer(deployment) == "second"


def test_modules_reach_a_service_by_rays_working_dir(
    deployment: Deployment, shipped: dict[str, Any], tmp_path: Path
) -> None:
    package = tmp_path / "project" / "my_agent"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from my_agent.tool import own_version\n")
    (package / "tool.py").write_text(TOOL.format("from the zip"))
    # Ray takes the content of the archive's one top-level folder.
    archive = Path(shutil.make_archive(str(tmp_path / "my-agent"), "zip", tmp_path, "project"))
    config = copy.deepcopy(serve_config.with_options(shipped, "tools", {"modules": ["my_agent"]}))
    [tools] = [application for application in config["applications"] if application["name"] == "tools"]
    tools["runtime_env"] = {**tools.get("runtime_env", {}), "working_dir": archive.as_uri()}
    shutil.rmtree(package.parent)

    ServeApi(deployment.dashboard_url, deployment.token).deploy(config)

    until(lambda: answer(deployment) == "from the zip", 240.0)
