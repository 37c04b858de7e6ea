"""The promise: ranks on several nodes learn what ranks of one machine learn, and a lost one is named."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster_runs import start, step_of, stopped
from tests.cluster.ray_cluster import Cluster, until
from trackway.wire.trainer import RunState

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.cluster,
    pytest.mark.program("ip"),
    pytest.mark.program("redis-server", optional=True),
    pytest.mark.timeout(900),
]


PROGRAM = "from tests.cluster.learner_nodes import main; main()"
"""By import, since ranks cannot find functions of `__main__`."""


def test_ranks_on_two_nodes_learn_what_two_ranks_of_one_learn_until_one_is_killed(cluster: Cluster) -> None:
    with cluster.timed("two learners"):
        process = cluster.nodes["one"].run(sys.executable, "-c", PROGRAM)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    results = json.loads(said.splitlines()[-1])

    assert results["together"] == results["alone"]
    two = cluster.nodes["two"].address
    assert results["error"].startswith(f"rank 1 of the learner on node {two} ended by SIGKILL during 'publish_share' (")
    assert results["refused"] == (
        "trainer.nnodes: expected 2 Ray nodes besides the trainer's, offering trackway_learner 1, CPU 1 each, got 1 in "
        "2 s; add such nodes, or lower trainer.nnodes"
    )
    assert set(results["states"]) == {"REMOVED"}
    assert ranks_of(cluster) == []


def test_a_run_whose_learner_lost_a_node_goes_on_from_its_checkpoint(cluster: Cluster) -> None:
    name = start(cluster, "spread", "trainer.nnodes=2", "trainer.save_freq=1")
    until(lambda: step_of(cluster, name) >= 1)
    assert len(ranks_of(cluster)) == 1
    before = step_of(cluster, name)
    cluster.nodes["two"].kill()
    cluster.nodes["two"].start()
    with cluster.timed("the node again to the end of two steps"):
        until(lambda: step_of(cluster, name) >= before + 2)
    info = stopped(cluster, name)

    log = (Path(info.folder) / "worker.log").read_text()
    node = f"rank 1 of the learner on node {cluster.nodes['two'].address}"
    assert (info.state, info.restarts) == (RunState.STOPPED, 1), log
    assert f"RankError: {node} ended by the death of its node, or of Ray's actor there, during " in log
    assert ranks_of(cluster) == []


def ranks_of(cluster: Cluster) -> list[list[str]]:
    """The command lines of ranks whose first one is in the cluster's network."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    module = "trackway.trainer.learner.ranks.process"
    return [line for line in lines if module in line and cluster.nodes["one"].address in line]
