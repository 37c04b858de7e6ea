"""The promise: tool replicas come, go and die alone; no trajectory hangs, and none loses more than a dead replica held.

Calls take the replicas' own ports, as they do from the shipped agent service. The tests follow one tool server through
one replica, two, and one again.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import RequestParamsMeta

from tests.e2e.test_scaling import AUTOSCALING, applications
from tests.e2e.tool_callers import GROUP, GROUPS, TOOL, Sessions, Trajectories
from tests.waiting import until
from trackway.clients import ToolsClient, run
from trackway.clients.http_client import authorization, resolve_token
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi
from trackway.wire.errors import ErrorCode
from trackway.wire.service import ReplicaInfo
from trackway.wire.tools import OneShotRequest
from trackway.wire.trajectory import Incident, StopReason

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SLOW_TOOL = '''
import asyncio
from trackway.tools import function_tool

@function_tool
async def wait(seconds: float) -> str:
    """Let time pass."""
    await asyncio.sleep(seconds)
    return "done"
'''


@pytest.fixture(scope="module")
def two_replicas(deployment: Deployment) -> Iterator[list[ReplicaInfo]]:
    """Of the session's tool server, which is left with one and as it was."""
    before = deployment.serve_config
    yield serve_api.scale(deployment, "tools", 2)
    deployment.serve_config = before
    serve_api.scale(deployment, "tools", 1)
    # A deployment of the whole config takes all applications away from RUNNING for a moment.
    until(lambda: {service.status for service in serve_api.service_statuses(deployment)} == {"RUNNING"})


def url(deployment: Deployment) -> str:
    return f"{deployment.base_url}/tools"


def replicas(deployment: Deployment) -> list[ReplicaInfo]:
    [tools] = [service for service in serve_api.service_statuses(deployment) if service.service == "tools"]
    return tools.replicas


def states(deployment: Deployment) -> dict[str, int]:
    return ServeApi(deployment.dashboard_url, deployment.token).applications()["tools"].replicas


def living(replica: ReplicaInfo) -> int:
    """Instances on one replica, by its own address."""
    return run(ToolsClient(str(replica.url)).instances()).total


def test_a_killed_replica_costs_no_trajectory_and_only_its_own_instances(
    deployment: Deployment, two_replicas: list[ReplicaInfo]
) -> None:
    first, second = two_replicas
    sessions, running = Sessions(deployment, 12), Trajectories(deployment)
    until(
        lambda: (
            min(
                living(replica) - list(sessions.homes.values()).count(replica.health.replica)
                for replica in two_replicas
            )
            >= 4
        )
    )
    os.kill(first.health.pid, signal.SIGKILL)
    made = running.end()
    sessions.end()
    assert {(trajectory.stop_reason, trajectory.error) for trajectory in made} == {(StopReason.ANSWERED, None)}
    assert len({trajectory.id for trajectory in made}) == GROUPS * GROUP
    assert {tuple(trajectory.tool_rewards) for trajectory in made} == {
        (0.0, -0.05, -0.05, -0.05)
    }  # no answer is better than the one before
    assert sum(Incident.INSTANCE_LOST in trajectory.incidents for trajectory in made) >= 4
    assert (sessions.ends(first), sessions.ends(second)) == ({ErrorCode.INSTANCE_LOST}, {"1.0"})
    until(lambda: states(deployment) == {"RUNNING": 2})


@pytest.mark.usefixtures("two_replicas")
def test_an_mcp_session_with_a_name_meets_one_replica_behind_the_proxy(deployment: Deployment) -> None:
    meta: RequestParamsMeta = {"trackway/create_kwargs": {"ground_truth": "72"}}  # pyright: ignore[reportAssignmentType]

    async def session(name: str) -> list[object]:
        headers = {"x-session-id": name, **authorization(resolve_token())}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(f"{url(deployment)}/mcp", http_client=http), mode="legacy") as client,
        ):
            results = [await client.call_tool(TOOL, {"answer": "72"}, meta=meta) for _ in range(3)]
        return [(result.meta or {}).get("trackway/reward", 0.0) for result in results]

    async def sessions() -> list[list[object]]:
        return await asyncio.gather(*(session(f"mcp {number}") for number in range(8)))

    assert run(sessions()) == [[0.0, -0.05, -0.05]] * 8


@pytest.mark.usefixtures("two_replicas")
def test_a_leaving_replica_answers_until_its_instances_are_released(deployment: Deployment) -> None:
    sessions = Sessions(deployment, 12)
    assert set(sessions.homes.values()) == {replica.health.replica for replica in replicas(deployment)}
    api = ServeApi(deployment.dashboard_url, deployment.token)
    api.deploy(serve_config.with_replicas(deployment.serve_config, "tools", Replicas(1, 1)))
    until(lambda: states(deployment) == {"RUNNING": 1, "STOPPING": 1})
    calls = sessions.calls
    until(lambda: sessions.calls >= calls + 4 * len(sessions.homes))
    sessions.end()
    assert list(sessions.ended.values()) == ["1.0"] * 12
    until(lambda: states(deployment) == {"RUNNING": 1})


@pytest.mark.extended
@pytest.mark.usefixtures("two_replicas")
def test_replicas_follow_calls_that_serve_does_not_see(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TOOL)
    config = serve_config.with_replicas(deployment.serve_config, "tools", Replicas(1, 3))
    [own] = [app for app in applications(config) if app["name"] == "tools"]
    own["args"] |= {"function_tool_path": str(tmp_path / "slow.py")}
    own["deployments"][0]["autoscaling_config"] |= AUTOSCALING
    had = deployment.serve_config
    deployment.serve_config = config
    before = {replica.health.pid for replica in replicas(deployment)}
    serve_api.scale(deployment, "tools", Replicas(1, 3))
    until(lambda: before.isdisjoint(replica.health.pid for replica in replicas(deployment)))  # these lack the slow tool
    until(lambda: states(deployment) == {"RUNNING": 1})
    with busy(deployment, at_once=24):
        until(lambda: states(deployment).get("RUNNING") == 3)
    until(lambda: states(deployment) == {"RUNNING": 1})
    slow = {replica.health.pid for replica in replicas(deployment)}
    deployment.serve_config = had
    serve_api.scale(deployment, "tools", 2)
    until(lambda: slow.isdisjoint(replica.health.pid for replica in replicas(deployment)))


@contextlib.contextmanager
def busy(deployment: Deployment, at_once: int) -> Iterator[None]:
    """That many calls in work all the time, past the proxy."""
    over = threading.Event()

    async def line(client: ToolsClient) -> None:
        while not over.is_set():
            await client.one_shot("wait", OneShotRequest(arguments={"seconds": 0.5}))

    async def lines() -> None:
        client = ToolsClient(url(deployment), direct=True)
        await asyncio.gather(*(line(client) for _ in range(at_once)))

    thread = threading.Thread(target=lambda: run(lines()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
