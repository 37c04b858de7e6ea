"""What a node that drains waits for; the rest needs a cluster, which tests/cluster has."""

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
