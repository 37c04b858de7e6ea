"""deploy/docker/compose.yaml: by compose's own schema, and each service started with its words and variables."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import yaml
from jsonschema import Draft7Validator
from tenacity import retry, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed

from tests.console.example_run import write_run
from trackway.clients.weights import WeightStore
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.attach import attach
from trackway.deploy.deployment.serve_api import ServiceStatus, service_statuses
from trackway.deploy.local.single_service import app_of
from trackway.system import free_port
from trackway.trainer.run_state.trajectories import read_trajectories

DOCKER = Path(__file__).parents[2] / "deploy" / "docker"
SCHEMA = Path(__file__).with_name("compose-spec.json.gz")
"""schema/compose-spec.json of github.com/compose-spec/compose-spec, commit 170098b (Apache-2.0)."""
ENDED = ("finished", "failed", "stopped")
SERVICES = ("tools", "reward", "rollout", "agent", "trainer")


def compose_file() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def schema_errors(document: dict[str, Any]) -> list[str]:
    return [
        error.message
        for error in Draft7Validator(json.loads(gzip.decompress(SCHEMA.read_bytes()))).iter_errors(document)
    ]


def test_the_file_is_valid_by_the_compose_specification() -> None:
    wrong = compose_file()
    wrong["services"]["tools"]["comand"] = []

    assert schema_errors(compose_file()) == []
    assert len(schema_errors(wrong)) == 1


def test_its_images_are_those_that_make_image_builds() -> None:
    known = re.findall(r"^    ([\w-]+)\) ", (DOCKER / "build.sh").read_text(), flags=re.MULTILINE)
    version = re.search(r'^version = "(.*)"', (DOCKER / "../../pyproject.toml").read_text(), flags=re.MULTILINE)
    assert version is not None

    images = {service["image"] for service in compose_file()["services"].values()}

    assert images == {f"trackway-tools:{version[1]}", f"trackway-services-cpu:{version[1]}"}
    assert {image.removeprefix("trackway-").partition(":")[0] for image in images} <= set(known)


def variables(service: str, folder: Path) -> dict[str, str]:
    """The service's variables, with paths of this machine in place of the image's."""
    given: dict[str, str] = compose_file()["services"][service]["environment"]
    outside = {"TRACKWAY_MODEL_PATH": str(TINY_MODEL)}
    return {name: value.replace("/var/lib/trackway", str(folder)) for name, value in {**given, **outside}.items()}


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_each_service_takes_the_variables(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRACKWAY_")]:
        monkeypatch.delenv(name)
    for name, value in variables(service, tmp_path).items():
        monkeypatch.setenv(name, value)

    assert app_of(service).title == f"Trackway {service}"  # pyright: ignore[reportArgumentType]


@contextmanager
def started(service: str, folder: Path, ports: dict[str, str], **given: str) -> Iterator[None]:
    """The service as the file starts it, but as a process of this machine, on a free port and with these variables."""

    def there(text: str) -> str:
        for port, free in ports.items():
            text = text.replace(port, free)
        return text.replace("/var/lib/trackway", str(folder))

    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRACKWAY_")}
    own = {name: there(value) for name, value in variables(service, folder).items() if name != "MLFLOW_TRACKING_URI"}
    words = [there(word) for word in compose_file()["services"][service]["command"]]
    with (folder / f"{service}.log").open("w") as log:
        command = [sys.executable, "-m", "trackway.deploy.cli", *words]
        process = subprocess.Popen(command, cwd=folder, env=clean | own | given, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@retry(stop=stop_after_delay(240), wait=wait_fixed(0.5), retry=retry_if_exception_type(httpx.HTTPError), reraise=True)
def ready(client: httpx.Client) -> None:
    client.get("/ready").raise_for_status()


@pytest.mark.slow
def test_the_console_of_the_file_shows_the_runs_on_the_volume_which_it_cannot_write(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs")
    port = str(free_port())

    with (
        started("console", tmp_path, {"8100": port}),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        ready(client)
        runs = client.get("/api/runs").raise_for_status().json()["runs"]

    assert [run["key"] for run in runs] == ["tidy"]
    assert compose_file()["services"]["console"]["volumes"] == ["data:/var/lib/trackway:ro"]


def trained(folder: Path, config: dict[str, Any], **given: str) -> tuple[dict[str, Any], list[ServiceStatus]]:
    """A run of the five services, and what was said of them before it; with more keys and variables."""
    from trackway.trainer.data.make import make_tiny  # a second of CPU that collection saves

    folder.mkdir(exist_ok=True)
    make_tiny(folder / "data", 8, 2, seed=0)
    config = {
        "data.train_files": str(folder / "data/train.parquet"),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 96,
        "data.max_response_length": 32,
        "actor_rollout_ref.model.path": str(TINY_MODEL),
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.trace.backend": "dummy",
        "trainer.total_training_steps": 1,
        "trainer.experiment_name": "first",
    } | config
    ports = {str(8001 + place): str(free_port()) for place in range(5)}
    with ExitStack() as stack:
        for service in SERVICES:
            stack.enter_context(started(service, folder, ports, **given))
        for port in ports.values():
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                ready(client)
        own = [f"{name}=http://127.0.0.1:{port}" for name, port in zip(SERVICES, ports.values(), strict=True)]
        there = attach(None, own, None, None, folder / "here", 10.0, lambda *_: None)
        statuses = service_statuses(there)
        with httpx.Client(base_url=f"http://127.0.0.1:{ports['8005']}", trust_env=False, timeout=60) as trainer:
            trainer.post("/runs", json={"config": config}).raise_for_status()
            return ended(trainer), statuses


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_five_services_of_the_file_train_together(tmp_path: Path) -> None:
    run, statuses = trained(tmp_path, {})

    assert (run["state"], run["step"], run["message"]) == ("finished", 1, "")
    assert run["metrics"]["training/global_step"] == 1.0
    assert (run["threads"], run["engine_threads"]) == (1, 1)
    assert {status.service: [replica.ready.ready for replica in status.replicas] for status in statuses} == {
        service: [True] for service in SERVICES
    }
    assert (tmp_path / "outputs/first/trajectories/step_1.parquet").is_file()


@pytest.mark.slow
@pytest.mark.stores
@pytest.mark.timeout(900)
def test_weights_checkpoints_and_artifacts_of_a_run_are_in_s3_and_its_metrics_and_traces_in_mlflow(
    tmp_path: Path, object_store: str, mlflow_server: str
) -> None:
    from mlflow import MlflowClient

    config = {
        "actor_rollout_ref.rollout.trace.backend": "mlflow",
        "trainer.logger": ["mlflow"],
        "trainer.project_name": "stores",
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.default_hdfs_dir": f"{object_store}/checkpoints",
    }
    weights = f"{object_store}/weights"
    run, _ = trained(tmp_path / "here", config, TRACKWAY_WEIGHTS_URL=weights, MLFLOW_TRACKING_URI=mlflow_server)

    assert (run["state"], run["step"], run["message"]) == ("finished", 2, "")
    latest = WeightStore(weights).latest()
    assert latest is not None and (latest.run, latest.version) == ("first", 3)
    assert not (tmp_path / "here/weights").exists()
    sampled = read_trajectories(tmp_path / "here/outputs/first/trajectories/step_2.parquet")
    assert {span.version for trajectory in sampled for row in trajectory.rows for span in row.weight_versions} == {2}
    client = MlflowClient(mlflow_server)
    experiment = client.get_experiment_by_name("stores")
    assert experiment
    [record] = client.search_runs([experiment.experiment_id])
    assert record.data.metrics["training/global_step"] == 2.0
    traces = client.search_traces(locations=[experiment.experiment_id], filter_string="tags.step = '2'")
    assert [trace.info.state for trace in traces] == ["OK"] * len(sampled)
    client.log_text(record.info.run_id, "of a client", "notes.txt")
    [stored] = fsspec.filesystem("s3").glob(f"{object_store}/artifacts/**/notes.txt")
    assert fsspec.filesystem("s3").cat_file(stored) == b"of a client"

    copies = f"{object_store}/checkpoints/first"
    assert [path.rpartition("/")[2] for path in fsspec.filesystem("s3").ls(copies)] == ["global_step_2"]
    resumed = {
        **config,
        "trainer.total_training_steps": 3,
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": f"{copies}/global_step_2",
    }
    run, _ = trained(tmp_path / "there", resumed, TRACKWAY_WEIGHTS_URL=weights, MLFLOW_TRACKING_URI=mlflow_server)
    assert (run["state"], run["step"], run["message"]) == ("finished", 3, "")
    assert not (tmp_path / "there/outputs/first/trajectories/step_2.parquet").exists()


@retry(stop=stop_after_delay(300), wait=wait_fixed(0.5), retry=retry_if_result(lambda run: run["state"] not in ENDED))
def ended(trainer: httpx.Client) -> dict[str, Any]:
    return trainer.get("/runs/first").raise_for_status().json()
