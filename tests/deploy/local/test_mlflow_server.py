"""`trackway ui`: the address is printed once MLflow answers, and leads to the newest run's traces."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from trackway.deploy.local import mlflow_server
from trackway.run_config import RunConfig
from trackway.system import free_port
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls

pytestmark = pytest.mark.slow  # a real MLflow


# The text waits for the same server as the document, and costs another start of MLflow.
@pytest.mark.parametrize(
    "json_option", [pytest.param([], marks=pytest.mark.extended), ["--json"]], ids=["text", "json"]
)
def test_the_page_answers_when_its_address_is_printed(json_option: list[str], tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").touch()
    run = RunFolder(tmp_path / "run")
    run.create(RunConfig(), ServiceUrls(agent_url="", tools_url="", reward_url="", weights_url=""))
    run.update(experiment_id="7")
    port = free_port()
    where = ["--outputs", str(tmp_path), "--port", str(port)]
    command = [sys.executable, "-m", "trackway.deploy.cli", "ui", *where, *json_option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            if json_option:
                document = "".join(iter(process.stdout.readline, "}\n")) + "}"
                address = json.loads(document)["traces"]
            else:
                address = re.findall(r"http://\S+", process.stdout.readline())[0]
            answer = httpx.get(address, timeout=10)
        finally:
            process.terminate()

    assert address == f"http://127.0.0.1:{port}/#/experiments/7/traces"
    assert answer.status_code == 200
    assert process.returncode == 130
    assert not mlflow_server.answers(f"http://127.0.0.1:{port}")


def test_a_server_that_never_answers_is_given_up_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_server, "START_DEADLINE_S", 0.0)
    server = mlflow_server.processes.start(
        "mlflow", [sys.executable, "-c", "import signal; signal.pause()"], {}, tmp_path / "log"
    )
    try:
        with pytest.raises(UserError, match=r"expected MLflow to answer at http://127.0.0.1:9 within 0 s.*log"):
            mlflow_server.wait_until_ready(server, "http://127.0.0.1:9")
    finally:
        mlflow_server.processes.stop_tree(server)
