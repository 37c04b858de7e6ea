"""The promise: nodes and heads die, links break and nodes are drained under a run, and it loses no trajectory.

The services are those of the manifests' Serve config, on three Ray nodes; what each thing took is printed.
"""

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Callable

import pytest

from tests.cluster.cluster_runs import (
    generate,
    generating,
    goes_on,
    lost_nothing,
    ranks_of,
    start,
    step_of,
    stopped,
    trace_gaps,
)
from tests.cluster.ray_cluster import SERVICES, Cluster, until
from trackway.clients import run
from trackway.traces.verify import Gap
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunState

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.chaos,  # a cluster takes minutes to start
    pytest.mark.cluster,
    pytest.mark.program("ip"),
    pytest.mark.program("redis-server", optional=True),
    pytest.mark.timeout(1800),
]

LONG = 900
"""Tokens that the tiny model writes for a good while."""


def test_a_run_outlives_the_death_and_the_cut_of_a_node(cluster: Cluster) -> None:
    both = ["one", "two"]
    assert cluster.placed() == {**dict.fromkeys(("rollout", "tools", "reward", "agent"), both), "trainer": ["one"]}
    name = start(cluster, "nodes")
    until(lambda: step_of(cluster, name) >= 1)
    killed = step_of(cluster, name)
    lose(cluster, name, "kill", cluster.nodes["two"].kill)
    bring_back(cluster)
    until(lambda: step_of(cluster, name) > killed + 2)
    lose(cluster, name, "cut", lambda: cluster.network.cut("two"))
    until(lambda: "two" not in cluster.known_alive())
    cluster.network.heal("two")
    cluster.nodes["two"].kill()  # after a partition only a restart helps, which KubeRay's liveness probe brings about
    bring_back(cluster, same_pod=True)
    goes_on(cluster, name, 1)
    info = stopped(cluster, name)
    lost_nothing(info)
    assert [gap for gap in trace_gaps(cluster, info) if not died_with_it(gap, killed)] == []


def lose(cluster: Cluster, name: str, how: str, act: Callable[[], None]) -> None:
    """The run goes on without the node."""
    before = step_of(cluster, name)
    act()
    with cluster.timed(f"{how} to an answered generation"):
        run(generate(cluster, 2, attempts=5))
    with cluster.timed(f"{how} to the end of two steps"):
        until(lambda: step_of(cluster, name) >= before + 2)


def bring_back(cluster: Cluster, same_pod: bool = False) -> None:
    """The lost node, or another in its place."""
    with cluster.timed("the node again"):
        cluster.nodes["two"].start(same_pod)
    with cluster.timed("its replicas again"):
        until(cluster.complete)


def died_with_it(gap: Gap, killed: int) -> bool:
    """Whether the trajectory began before the kill was over; what the node had not exported by then is gone."""
    return int(gap.trajectory.split("/")[1].removeprefix("val")) <= killed + 1


@pytest.mark.program("redis-server")
def test_a_run_and_every_replica_outlive_the_head(cluster: Cluster) -> None:
    before = names(cluster)
    name = start(cluster, "head")
    until(lambda: step_of(cluster, name) >= 1)
    killed = step_of(cluster, name)
    cluster.nodes["head"].kill()
    with cluster.timed("kill of the head to an answered generation"):
        run(generate(cluster, 2))
    with cluster.timed("kill of the head to the end of two steps"):
        until(lambda: step_of(cluster, name) >= killed + 2)
    with cluster.timed("the head again"):
        cluster.nodes["head"].start()
    with cluster.timed("Serve again"):
        until(cluster.api.answers)
        until(cluster.complete)
    goes_on(cluster, name, 1)
    info = stopped(cluster, name)
    lost_nothing(info)
    assert names(cluster) == before
    assert trace_gaps(cluster, info) == []


def names(cluster: Cluster) -> dict[str, list[str]]:
    """Each service's replicas, by their own names."""
    return {service: [replica.health.replica for replica in cluster.replicas(service)] for service in SERVICES}


PROGRAM = "from tests.cluster.learner_nodes import main; main()"
"""By import, since ranks cannot find functions of `__main__`."""


def test_ranks_on_two_nodes_learn_what_two_ranks_of_one_learn_until_one_is_killed(cluster: Cluster) -> None:
    with cluster.timed("two learners"):
        process = cluster.nodes["one"].run(sys.executable, "-c", PROGRAM)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    results = json.loads(said.splitlines()[-1])

    assert results["together"] == results["alone"]
    assert results["hosts"] == [cluster.nodes["one"].address]
    two = cluster.nodes["two"].address
    assert results["error"].startswith(f"rank 1 of the learner on node {two} ended by SIGKILL during 'log_probs' (")
    assert results["refused"] == (
        "trainer.nnodes: expected 2 Ray nodes besides the trainer's, offering trackway_learner 1, CPU 1 each, got 1 in "
        "2 s; add such nodes, or lower trainer.nnodes"
    )
    assert set(results["states"]) == {"REMOVED"}
    assert ranks_of(cluster) == []


def test_a_drained_node_ends_what_it_has_begun_and_is_empty_then(cluster: Cluster) -> None:
    before = {replica.health.replica for replica in cluster.replicas("rollout")}
    answered, hurried = run(drained_meanwhile(cluster))
    print(f"{len(answered)} generations of {LONG} tokens meanwhile", flush=True)
    [gone] = before - {replica.health.replica for replica in cluster.replicas("rollout")}
    assert hurried.startswith("drain: not empty (SERVE_REPLICA::") and "SERVE_REPLICA::rollout" in hurried
    assert gone in answered
    assert {host for hosts in cluster.placed().values() for host in hosts} == {"one"}
    cluster.nodes["two"].kill()
    assert run(generate(cluster, 2)) not in ("", gone)


async def drained_meanwhile(cluster: Cluster) -> tuple[list[str], str]:
    """Who answered the generations that were always under way, each asked for once; and what the first drain said."""
    answered: list[str] = []
    over = asyncio.Event()

    async def line(number: int) -> None:
        for count in itertools.count():
            if over.is_set():
                break
            answered.append(await generate(cluster, LONG, f"{number}-{count}"))

    async with asyncio.TaskGroup() as lines:
        for number in range(16):
            lines.create_task(line(number))
        await generating(cluster, 16)
        hurried = await asyncio.to_thread(drain, cluster, 1)
        with cluster.timed("drain until the node is empty"):
            await asyncio.to_thread(until, lambda: drain(cluster, 90).startswith("drain: empty after "))
        over.set()
    return answered, hurried


@pytest.mark.program("redis-server")
def test_a_run_is_saved_and_its_node_stops_when_the_whole_cluster_goes(cluster: Cluster) -> None:
    name = start(cluster, "gone")
    until(lambda: step_of(cluster, name) >= 1)
    folder = RunFolder(cluster.deployment.outputs / name)
    cluster.nodes["head"].kill()
    with cluster.timed("kill of the head to the end of the hook"):
        said = drain(cluster, 300, "one")
    assert re.fullmatch(r"drain: not empty \(the cluster does not answer\) after [0-9]+ s", said.splitlines()[-1])
    info = folder.info()
    assert (info.state, info.interrupted, info.restarts) == (RunState.STOPPED, True, 0)
    assert max(path.name for path in folder.checkpoints.glob("global_step_*")) == f"global_step_{info.step}"
    cluster.nodes["head"].start()
    until(cluster.complete)
    until(lambda: step_of(cluster, name) > info.step)  # it resumes by itself


def drain(cluster: Cluster, timeout_s: int, node: str = "two") -> str:
    """What the preStop hook of the node says."""
    words = [sys.executable, "-m", "trackway.deploy.drain", "--timeout", str(timeout_s)]
    process = cluster.nodes[node].run(*words)
    said, _ = process.communicate(timeout=timeout_s + 90)
    assert process.returncode == 0, said
    return said.strip()
