"""A replica that Ray starts on another Python is found before anything is trained."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.waiting import until
from trackway.deploy.config import serve_config
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi
from trackway.deploy.local.up import check_interpreters
from trackway.system.process import UserError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def reward_runs(deployment: Deployment, python: str) -> bool:
    [reward] = [service for service in serve_api.service_statuses(deployment) if service.service == "reward"]
    return [replica.health.executable for replica in reward.replicas] == [python]


@pytest.fixture
def elsewhere(deployment: Deployment, other_environment: Path) -> Iterator[str]:
    """The reward service on another interpreter for the time of a test."""
    api, before = ServeApi(deployment.dashboard_url, deployment.token), deployment.serve_config
    ours = serve_api.service_statuses(deployment)[deployment.services.index("reward")].replicas[0].health.executable
    changed = {"ray_actor_options": {"runtime_env": {"py_executable": str(other_environment)}}}
    api.deploy(serve_config.with_options(before, "reward", {}, changed))
    until(lambda: reward_runs(deployment, str(other_environment)), 240.0)
    yield str(other_environment)
    api.deploy(before)
    until(lambda: reward_runs(deployment, ours), 240.0)


def test_replicas_of_our_environment_pass(deployment: Deployment) -> None:
    check_interpreters(deployment)


def test_a_replica_on_another_python_and_package_is_named_with_both_sides(
    deployment: Deployment, elsewhere: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_interpreters(deployment)

    told = str(caught.value)
    assert told.startswith("reward replica ") and f", got {elsewhere} (" in told
    assert f"pydantic: expected {version('pydantic')}, got 2.0.1; start both from one environment" in told
