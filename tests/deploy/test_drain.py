"""What a node that drains waits for; the rest needs a cluster, which tests/cluster has."""

import socket
import subprocess
import sys
import time

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]

from trackway.deploy.drain import replicas_on

HERE, ELSEWHERE = "ab" * 28, "cd" * 28


def actor(name: str, node: str = HERE, state: str = "ALIVE") -> ActorTableData:
    made = ActorTableData(name=name, state=ActorTableData.ActorState.Value(state))
    made.address.node_id = bytes.fromhex(node)
    return made


def test_the_replicas_of_this_node_are_waited_for_and_nothing_else() -> None:
    actors = [
        actor("SERVE_REPLICA::tools#tools#b2"),
        actor("SERVE_REPLICA::rollout#rollout#a1"),
        actor("SERVE_REPLICA::rollout#rollout#c3", ELSEWHERE),
        actor("SERVE_REPLICA::rollout#rollout#d4", state="DEAD"),
        actor("SERVE_CONTROLLER_ACTOR"),
        actor("SERVE_PROXY_ACTOR-ab"),  # it serves those that end, and goes with the pod
    ]
    assert replicas_on(HERE, actors) == ["SERVE_REPLICA::rollout#rollout#a1", "SERVE_REPLICA::tools#tools#b2"]


@pytest.mark.slow
def test_a_store_that_says_nothing_is_waited_for_no_longer_than_its_answer_takes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asks = f"print(drain({HERE!r}, '127.0.0.1:{silent.getsockname()[1]}', 1.0))"
        program = f"from trackway.deploy.drain import drain; print('imported', flush=True); {asks}"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "imported\n"
            began = time.monotonic()
            said, _ = process.communicate(timeout=120)
            took = time.monotonic() - began
    assert (process.returncode, said) == (0, "['the cluster does not answer']\n")
    assert took < 30  # Ray's client alone would take 40 s to give up
