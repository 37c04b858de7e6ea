"""How a run offers weights, against how running services take them."""

from pathlib import Path
from typing import Any

from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.checks.findings import Findings
from trackway.deploy.checks.run import RunCheck, Subject
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.run_config import compose


def found(folder: Path, attached: bool = False, **rollout: Any) -> Findings:
    """The findings about the machine of a run that offers its weights."""
    services = serve_config.with_options(serve_config.load(CPU_CONFIG), "rollout", rollout)
    there = Deployment(
        base_url="http://there",
        dashboard_url="",
        mlflow_uri="",
        outputs=folder,
        attached=attached,
        serve_config=services,
    )
    config = compose(["trainer.logger=[console]", "trackway.weights_transport=ipc"])
    check = RunCheck(Subject(config, None, there, UpSettings.read()), load=False, report=lambda name, state: None)
    check.machine()
    return check.findings


def test_services_that_read_the_store_alone_are_named(tmp_path: Path) -> None:
    assert found(tmp_path).missing_here == [
        "trackway.weights_transport: expected a rollout service with weights_transport: ipc, got none; stop the "
        "services with `trackway down`, so that the run starts its own"
    ]


def test_services_that_take_them_are_enough(tmp_path: Path) -> None:
    assert found(tmp_path, weights_transport="ipc").missing_here == []


def test_services_elsewhere_are_asked_when_the_run_starts(tmp_path: Path) -> None:
    findings = found(tmp_path, attached=True)
    assert (findings.missing_here, findings.not_checked) == (
        [],
        ["trackway.weights_transport: whether the rollout service has weights_transport: ipc"],
    )
