"""Emptying this Ray node before it stops: `python -m trackway.deploy.drain --timeout 660`, preStop of a worker pod.

The node is marked as draining, as `ray drain-node` does: Serve starts replacements of its replicas on other nodes, and
those here end what they have begun. Where there is no room for a replacement a replica is stopped all the same, when
no more than its `graceful_shutdown_timeout_s` is left of the timeout; so the timeout is to be the longer of the two.

This process is no Ray worker and stays small. Its exit status is 0 also when the time is up: the pod stops anyway.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable

from ray._private.services import canonicalize_bootstrap_address_or_die, find_node_ids
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayError

from trackway.deploy.errors import UserError

_PREEMPTION = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
_POLL_S = 1.0
_ANSWER_S = 10.0
"""Longest wait for one answer of the cluster's control store."""
_REPLICA = "SERVE_REPLICA::"
"""How the names of Serve's replicas begin."""


async def drain(timeout_s: float) -> list[str]:
    """Drain this node and wait until no replica of Serve runs on it; those that still do when the time is up.

    Raises:
        UserError: no Ray node runs here, or the cluster cannot be asked.
    """
    end = time.monotonic() + timeout_s
    node = _this_node()
    store = GcsClient(address=_cluster())
    until_ms = int((time.time() + timeout_s) * 1000)
    accepted, reason = store.drain_node(node, _PREEMPTION, "its pod stops", until_ms)
    if not accepted:
        raise UserError(f"Ray does not drain node {node}: {reason}")
    while (left := await _left(store, node)) and time.monotonic() < end:
        await asyncio.sleep(_POLL_S)
    return left


async def _left(store: GcsClient, node: str) -> list[str]:
    try:
        actors = await store.async_get_all_actor_info(timeout=_ANSWER_S)
    except RayError as error:  # the head may be on its way back
        return [f"what the cluster does not tell ({type(error).__name__})"]
    return replicas_on(node, actors.values())


def replicas_on(node: str, actors: Iterable[ActorTableData]) -> list[str]:
    """Names of the node's living replicas."""
    return sorted(
        actor.name
        for actor in actors
        if actor.state == ActorTableData.ALIVE
        and actor.address.node_id.hex() == node
        and actor.name.startswith(_REPLICA)
    )


def _this_node() -> str:
    found = find_node_ids()
    if len(found) != 1:
        raise UserError(f"expected one Ray node on this machine, got {len(found)}; nothing is drained")
    return found.pop()


def _cluster() -> str:
    try:
        return canonicalize_bootstrap_address_or_die("auto")
    except ConnectionError as error:
        raise UserError(f"no Ray cluster to be asked: {error}; set RAY_ADDRESS") from error


def main(arguments: list[str] | None = None) -> int:
    """Drain this node and say how it went."""
    parser = argparse.ArgumentParser(prog="trackway.deploy.drain", description="Empty this Ray node before it stops.")
    parser.add_argument("--timeout", type=float, default=660.0, help="longest wait, in seconds (default: 660)")
    timeout_s, began = parser.parse_args(arguments).timeout, time.monotonic()
    try:
        left = asyncio.run(drain(timeout_s))
    except (UserError, RayError) as error:
        print(f"drain: {error}", file=sys.stderr)
        return 1
    how = f"the time is up, and left are {', '.join(left)}," if left else "empty"
    print(f"drain: {how} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
