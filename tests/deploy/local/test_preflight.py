"""What must be true before a start, each failure with its remedy."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from trackway.deploy.deployment.processes import ProcessRecord
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local import preflight
from trackway.deploy.local.settings import UpSettings
from trackway.system.process import UserError


def settings(tmp_path: Path, **given: object) -> UpSettings:
    (tmp_path / "config.json").write_text("{}")
    free = {"port": 0, "dashboard_port": 0, "ray_port": 0, "mlflow_port": 0, "min_memory_gb": 0.001}
    return UpSettings.model_validate({"outputs": tmp_path / "out", "model_path": tmp_path, **free, **given})


def test_a_machine_that_has_everything_passes(tmp_path: Path) -> None:
    preflight.check(settings(tmp_path))


def test_a_taken_port_is_named_with_its_option(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} is in use; .* --mlflow-port"):
            preflight.check(settings(tmp_path, mlflow_port=port))


def test_too_little_memory_says_how_much_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected at least 100000.0 GB of free memory, got \d"):
        preflight.check(settings(tmp_path, min_memory_gb=100000.0))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model not found: .*nowhere/config.json"):
        preflight.check(settings(tmp_path, model_path=tmp_path / "nowhere"))


def test_a_running_deployment_is_not_started_twice(tmp_path: Path) -> None:
    started = psutil.Process(os.getpid()).create_time()
    mine = ProcessRecord(name="ray", pid=os.getpid(), started=started, log=tmp_path / "log")
    Deployment(
        base_url="http://here",
        dashboard_url="",
        token="t",
        mlflow_uri="",
        outputs=tmp_path / "out",
        processes=[mine],
        serve_config={},
    ).save()
    assert Deployment.path(tmp_path / "out").stat().st_mode & 0o077 == 0
    remedy = rf"are already running at http://here; stop them with `trackway down`.* \(ray: process {os.getpid()}\)"
    with pytest.raises(UserError, match=remedy):
        preflight.check(settings(tmp_path))
