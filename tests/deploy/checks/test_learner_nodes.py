"""The nodes that a learner's ranks need, against those of the cluster that the services run on."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from tests.serving import answered_by
from trackway.deploy.checks.findings import Findings
from trackway.deploy.checks.run import Checked, RunCheck, Subject
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.report import plan_report
from trackway.run_config import compose
from trackway.trainer.loop.forecast import forecast

ABLE = {"CPU": 8.0, "GPU": 8.0, "trackway_learner": 1.0}
NODES = [("ALIVE", {"CPU": 4.0, "trackway_trainer": 1.0}), ("ALIVE", ABLE), ("DEAD", ABLE)]


class Dashboard(BaseHTTPRequestHandler):
    """Ray's list of nodes."""

    def do_GET(self) -> None:
        nodes = [{"raylet": {"state": state, "resourcesTotal": offer}} for state, offer in NODES]
        self.send_response(200 if self.path == "/nodes?view=summary" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"summary": nodes}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    with answered_by(HTTPServer(("127.0.0.1", 0), Dashboard)) as url:
        yield url


def found(folder: Path, dashboard_url: str, *words: str, attached: bool = True) -> Findings:
    """The findings about the machines of a run on running services."""
    there = Deployment(
        base_url="http://there", dashboard_url=dashboard_url, mlflow_uri="", outputs=folder, attached=attached
    )
    config = compose(["trainer.logger=[console]", *words])
    check = RunCheck(Subject(config, None, there, UpSettings.read()), load=False, report=lambda name, state: None)
    check.machine()
    return check.findings


def test_nodes_that_a_cluster_lacks_are_said_with_the_time_that_they_may_take(tmp_path: Path, dashboard: str) -> None:
    keys = ("trainer.n_gpus_per_node=8", "trackway.placement_timeout_s=60")

    assert found(tmp_path, dashboard, "trainer.nnodes=2", *keys) == Findings()
    assert found(tmp_path, dashboard, "trainer.nnodes=3", *keys).not_checked == [
        "trainer.nnodes: expected 2 Ray nodes besides the trainer's, offering trackway_learner 1, CPU 8, GPU 8 each, "
        "got 1 now; the run waits 60 s for Ray's autoscaler to add them and fails without: add such nodes, or lower "
        "trainer.nnodes"
    ]


def test_nodes_that_cannot_be_counted_are_said(tmp_path: Path, dashboard: str) -> None:
    [unknown] = found(tmp_path, "", "trainer.nnodes=2").not_checked
    [away] = found(tmp_path, f"{dashboard}/elsewhere", "trainer.nnodes=2").not_checked

    assert unknown == (
        "trainer.nnodes: whether the cluster has 1 Ray node besides the trainer's, offering trackway_learner 1, CPU 1; "
        "attach with --ray-url"
    )
    assert away.startswith(f"trainer.nnodes: no list of Ray's nodes from {dashboard}/elsewhere/nodes (")


def test_services_of_this_machine_are_one_node(tmp_path: Path) -> None:
    [missing] = found(tmp_path, "", "trainer.nnodes=2", attached=False).missing_here

    assert missing.startswith("trainer.nnodes: expected 1 on this machine, got 2; ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], None),
        (["trackway.learner_ranks=4"], "4 ranks on the trainer's machine"),
        (["trainer.n_gpus_per_node=8"], "8 ranks on the trainer's machine"),
        (
            ["trainer.n_gpus_per_node=8", "trackway.learner_ranks=1"],
            "1 rank on the trainer's machine; 1 of 8 GPUs trains; set trackway.learner_ranks=8, unless rollout engines "
            "take the others",
        ),
        (["trainer.n_gpus_per_node=8", "trackway.device=cpu"], None),
        (
            ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"],
            "2 nodes x 8 ranks: needs 1 Ray node besides the trainer's, offering trackway_learner 1, CPU 8, GPU 8",
        ),
    ],
)
def test_the_plan_says_where_the_ranks_are(words: list[str], line: str | None) -> None:
    config, console = compose(words), Console(width=240)
    with console.capture() as capture:
        console.print(plan_report(Checked(Findings(), forecast(config, None), ""), config, None))

    lines = [" ".join(row.split()) for row in capture.get().splitlines()]
    assert [row.removeprefix("learner ") for row in lines if row.startswith("learner ")] == ([line] if line else [])
