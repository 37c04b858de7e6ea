"""The promise: a run whose learner lost a node says which, and goes on from its checkpoint on another one."""

from pathlib import Path

import pytest

from tests.cluster.cluster_runs import ranks_of, start, step_of, stopped
from tests.cluster.ray_cluster import Cluster, until
from trackway.wire.trainer import RunState

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.cluster,
    pytest.mark.program("ip"),
    pytest.mark.program("redis-server", optional=True),
    pytest.mark.timeout(900),
]


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
