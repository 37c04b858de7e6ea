"""The processes of a deployment: which there are, and which go first."""

import psutil
import pytest

from trackway.deploy.deployment.record import Deployment

pytestmark = pytest.mark.slow

SERVICES = {"rollout", "tools", "reward", "agent", "trainer"}
DISPENSABLE = ("log_monitor", "autoscaler/_private/monitor", "util.client.server", "ray-dashboard-NodeHead")


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
    assert server.nice() == 10


def test_ray_runs_nothing_that_only_its_dashboard_needs(deployment: Deployment):
    commands = [" ".join(process.cmdline()) for process in family(deployment, "ray")]
    assert [command for command in commands if any(part in command for part in DISPENSABLE)] == []
    assert sum(command.startswith("ray-dashboard-") for command in commands) == 1  # Serve's REST API
