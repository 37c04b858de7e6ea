"""The processes of a deployment: which there are, and which go first."""

from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pytest

from trackway.deploy.deployment.record import Deployment
from trackway.tracing.local_mlflow.mlflow_server import NICENESS

pytestmark = pytest.mark.e2e

SERVICES = {"rollout", "tools", "reward", "agent", "trainer"}
DISPENSABLE = ("log_monitor", "autoscaler/_private/monitor", "util.client.server", "ray-dashboard-NodeHead")
WORKERS = ("ray::ServeController", "ray::ProxyActor", "ray::ServeReplica")
LISTENING = (
    "gcs_server",
    "raylet/raylet",
    "ray-dashboard-ServeHead",
    "dashboard/dashboard.py",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "ray::ServeController",
    "ray::ProxyActor",
    "ray::ServeReplica",
    "ray::IDLE",
    "mlflow",
)


def family(deployment: Deployment, name: str) -> list[psutil.Process]:
    """A process that `trackway up` has started, and its descendants."""
    [root] = [record.find() for record in deployment.processes if record.name == name]
    assert root is not None
    return [root, *root.children(recursive=True)]


def test_services_go_before_the_local_mlflow(deployment: Deployment):
    niceness = {
        service: process.nice()
        for process in family(deployment, "ray")
        for service in SERVICES
        if process.cmdline()[0].startswith(f"ray::ServeReplica:{service}:")
    }
    assert niceness == dict.fromkeys(SERVICES, 0)
    [_, server] = family(deployment, "mlflow")
    assert server.nice() == NICENESS


def test_ray_runs_nothing_that_only_its_dashboard_needs(deployment: Deployment):
    commands = [" ".join(process.cmdline()) for process in family(deployment, "ray")]
    assert [command for command in commands if any(part in command for part in DISPENSABLE)] == []
    assert sum(command.startswith("ray-dashboard-") for command in commands) == 1  # Serve's REST API


def test_workers_are_forks_of_one_process_that_has_the_imports(deployment: Deployment):
    workers = [process for process in family(deployment, "ray") if process.cmdline()[0].startswith(WORKERS)]
    names = {process.cmdline()[0].split(":")[3] for process in workers if "Replica" in process.cmdline()[0]}
    assert names >= SERVICES
    parents = {parent for process in workers if (parent := process.parent())}
    [forks] = [parent.cmdline() for parent in parents]  # Ray's raylet is a parent of workers that are no forks
    assert "ray_forks" in " ".join(forks)


def listeners(deployment: Deployment) -> dict[str, set[str]]:
    """The addresses at which each kind of process takes connections and datagrams."""
    found: dict[str, set[str]] = {}
    for process in [*family(deployment, "ray"), *family(deployment, "mlflow")]:
        command = " ".join(process.cmdline())
        name = next((name for name in LISTENING if name in command), command)
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.type == SOCK_DGRAM and not connection.raddr):
                found.setdefault(name, set()).add(connection.laddr.ip.removeprefix("::ffff:"))
    return found


def test_everything_listens_on_loopback_and_is_documented(deployment: Deployment):
    found = listeners(deployment)
    assert {name: addresses for name, addresses in found.items() if addresses != {"127.0.0.1"}} == {}
    page = Path("docs/guides/security.md").read_text()
    assert [name for name in found if f"`{name}`" not in page] == []
    assert found.keys() >= {"gcs_server", "raylet/raylet", "ray::ProxyActor", "ray::ServeReplica", "mlflow"}
