"""The promise: with its state in Redis a cluster that loses its head loses nothing else."""

import shutil
from collections.abc import Iterator

import pytest
from lab import SERVICES, START_S, Cluster, running, until
from lab_runs import ended, generate, lost_nothing, start, step_of, trace_gaps

from trackway.clients import run

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 12


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("redis-server") is None:
        pytest.skip("expected `redis-server` (Debian's redis-server), got none")
    with running(tmp_path_factory.mktemp("head"), entry="one", redis=True) as made:
        yield made


def test_a_run_and_every_replica_outlive_the_head(cluster: Cluster) -> None:
    before = names(cluster)
    name = start(cluster, "head", STEPS)
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
        until(cluster.complete, START_S)
    info = ended(cluster, name)
    lost_nothing(info, STEPS)
    assert names(cluster) == before
    assert trace_gaps(cluster, info, STEPS) == []


def names(cluster: Cluster) -> dict[str, list[str]]:
    """Each service's replicas, by their own names."""
    return {service: [one.health.replica for one in cluster.replicas(service)] for service in SERVICES}
