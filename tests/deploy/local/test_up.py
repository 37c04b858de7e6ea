"""What a start hands to the services: where traces go, where they wait, and no secret."""

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.deployment import processes
from trackway.deploy.local import preflight, up
from trackway.deploy.local.settings import UpSettings
from trackway.system import free_port
from trackway.system.process import UserError


def settings(tmp_path: Path, **given: object) -> UpSettings:
    (tmp_path / "config.json").write_text("{}")
    free = {"port": 0, "dashboard_port": 0, "ray_port": 0, "mlflow_port": 0, "min_memory_gb": 0.001}
    return UpSettings.model_validate({"outputs": tmp_path / "out", "model_path": tmp_path, **free, **given})


def arguments(made: UpSettings) -> dict[str, dict]:
    completed = up._completed(serve_config.load(made.config), made, "http://here", 1234, "http://mlflow")
    applications: Any = completed["applications"]
    return {app["name"]: app["args"] for app in applications}


def command_line(process: psutil.Process) -> list[str]:
    """The words of a process, once it has started its program."""
    deadline = time.monotonic() + 30
    while not process.cmdline():
        assert time.monotonic() < deadline
    return process.cmdline()


@pytest.mark.parametrize(
    ("uri", "database"),
    [
        ("http://127.0.0.1:5000", None),
        ("https://mlflow.example.org/", None),
        ("sqlite:///{}/mine.db", "{}/mine.db"),
        ("{}/folder", "{}/folder/mlflow.db"),
        ("", "{}/out/mlflow/mlflow.db"),
    ],
)
def test_mlflow_tracking_uri_says_which_mlflow_is_used(tmp_path, monkeypatch, uri: str, database: str | None) -> None:
    monkeypatch.delenv("TRACKWAY_UP_MLFLOW_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(tmp_path))

    made = settings(tmp_path)

    assert made.mlflow_uri == (uri.format(tmp_path) or None)
    assert made.mlflow_database == (Path(database.format(tmp_path)) if database else None)


def test_the_trainer_gets_a_port_of_its_own_for_tinkers_sdk(tmp_path) -> None:
    services = arguments(settings(tmp_path, config=CPU_CONFIG))
    ports = {name: args.get("direct_port", 0) for name, args in services.items()}
    assert ports.pop("trainer") > 0 and set(ports.values()) == {0}


def test_an_mlflow_that_is_given_wins_over_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")

    assert settings(tmp_path, mlflow_uri="http://given").mlflow_uri == "http://given"


def test_an_mlflow_uri_that_cannot_take_spans_is_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(UserError, match=r"expected http\(s\)://..., sqlite:///file.db or a folder, got 'postgresql://"):
        preflight.check(settings(tmp_path, mlflow_uri="postgresql://me@here/db"))


def test_every_service_knows_mlflow_and_where_traces_wait(tmp_path) -> None:
    made = arguments(settings(tmp_path))

    tracing = {"mlflow_uri": "http://mlflow", "spool_dir": str(tmp_path / "out" / "spool")}
    assert {name: settings["tracing"] for name, settings in made.items()} == dict.fromkeys(made, tracing)
    assert len(made) == 5


def test_keys_of_the_environment_stand_in_no_serve_config(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret-key")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret-key")

    assert "secret-key" not in json.dumps(arguments(settings(tmp_path)))


@pytest.mark.slow
def test_a_local_database_gets_a_server_of_its_own_without_secrets_and_a_running_server_none(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRACKWAY_TOKEN", "secret-token")
    port = free_port()
    uri, [process] = up._mlflow(settings(tmp_path, mlflow_uri=f"sqlite:///{tmp_path}/mine.db"), port)
    try:
        running = process.find()
        assert running is not None and str(tmp_path / "mine.db") in command_line(running)
        assert "TRACKWAY_TOKEN" not in running.environ()
    finally:
        processes.stop_tree(process)

    assert uri == f"http://127.0.0.1:{port}"
    assert up._mlflow(settings(tmp_path, mlflow_uri="http://there/"), port) == ("http://there/", [])


def test_a_second_start_in_a_folder_names_the_first_and_touches_nothing(tmp_path, monkeypatch) -> None:
    made = settings(tmp_path)
    refused: list[str] = []

    def second_start(*_: object) -> None:
        with pytest.raises(UserError) as error:
            up.bring_up(made, lambda name, state: None)
        refused.append(str(error.value))
        raise UserError("the first start ends here")

    monkeypatch.setattr(preflight, "check", second_start)
    with pytest.raises(UserError, match="the first start ends here"):
        up.bring_up(made, lambda name, state: None)

    first = f"got one in progress: process {os.getpid()}; wait until it ends, stop it, or give another --outputs"
    assert refused == [f"expected no other start of services in {made.outputs}, {first}"]


def test_a_start_that_failed_keeps_no_later_one_out(tmp_path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="model not found"):
            up.bring_up(settings(tmp_path, model_path=tmp_path / "nowhere"), lambda name, state: None)
