"""Drain this Ray node before it stops: `python -m trackway.deploy.drain --timeout 660`, preStop of a worker pod.

The node is marked as draining, as `ray drain-node` does: Serve starts replacement replicas on other nodes, and replicas
here finish their requests. If no node has room for a replacement, the replica is stopped once only its
`graceful_shutdown_timeout_s` is left of the timeout, so the timeout must be the longer of the two.

Requests that entered by this node's proxy and run on another node are not waited for. Their clients retry under the
same idempotency key.

This process is not a Ray worker and stays small. Its exit status is 0 even if replicas remain, as the pod stops anyway.
"""

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from ray._private.services import canonicalize_bootstrap_address_or_die, find_node_ids
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayError

from trackway.system.user_error import UserError

_PREEMPTION = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
_POLL_S = 1.0
_ANSWER_S = 10.0
"""Longest wait for one answer from the cluster's control store."""
_SILENCE_S = 180.0
"""Longest wait for a lost head to return; it does not when all pods of a cluster are deleted."""
_SILENT = "the cluster does not answer"
_REPLICA = "SERVE_REPLICA::"
"""Prefix of the actor names of Serve's replicas."""


def drain(node: str, cluster: str, timeout_s: float) -> list[str]:
    """Drain a node and wait until no Serve replica runs on it; returns the replicas that remain at the timeout.

    If the control store does not answer, for example while the head restarts, it is polled until it has been silent for
    `_SILENCE_S` or the timeout has passed. The call returns at most `_ANSWER_S` after the timeout.

    Args:
        node: the node's id, hexadecimal.
        cluster: host:port of the control store.
        timeout_s: seconds.

    Raises:
        UserError: Ray refuses.
    """
    ended: Future[list[str]] = Future()

    def work() -> None:
        try:
            ended.set_result(asyncio.run(_drain(node, cluster, timeout_s)))
        except BaseException as error:
            ended.set_exception(error)

    # A daemon thread: creating Ray's client takes 40 s when the store is silent and cannot be interrupted.
    threading.Thread(target=work, daemon=True).start()
    try:
        return ended.result(timeout_s + _ANSWER_S)
    except TimeoutError:
        return [_SILENT]


async def _drain(node: str, cluster: str, timeout_s: float) -> list[str]:
    end, until_ms = time.monotonic() + timeout_s, int((time.time() + timeout_s) * 1000)
    left, heard, store = [_SILENT], time.monotonic(), None
    while True:
        try:
            if store is None:
                store = _draining(node, cluster, until_ms)
            actors = await store.async_get_all_actor_info(timeout=_ANSWER_S)
            left, heard = replicas_on(node, actors.values()), time.monotonic()
        except RayError as error:
            print(f"drain: {_SILENT} ({error})", file=sys.stderr)
            if time.monotonic() > heard + _SILENCE_S:
                return [_SILENT]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(_POLL_S)


def _draining(node: str, cluster: str, until_ms: int) -> GcsClient:
    """Start draining the node; returns the client of the control store."""
    store = GcsClient(address=cluster)
    accepted, reason = store.drain_node(node, _PREEMPTION, "its pod stops", until_ms, timeout=_ANSWER_S)
    if not accepted:
        raise UserError(f"Ray refused to drain node {node}: {reason}")
    return store


def replicas_on(node: str, actors: Iterable[ActorTableData]) -> list[str]:
    """Names of the node's running replicas."""
    return sorted(
        actor.name
        for actor in actors
        if actor.state == ActorTableData.ALIVE
        and actor.address.node_id.hex() == node
        and actor.name.startswith(_REPLICA)
    )


def _this_node() -> str:
    nodes = find_node_ids()
    if len(nodes) != 1:
        raise UserError(f"expected one Ray node on this machine, got {len(nodes)}; run this on a machine with one node")
    return nodes.pop()


def _cluster() -> str:
    try:
        return canonicalize_bootstrap_address_or_die("auto")
    except ConnectionError as error:
        raise UserError(f"expected a Ray cluster, got none: {error}; set RAY_ADDRESS") from error


def main(arguments: list[str] | None = None) -> int:
    """Drain this node and print the result."""
    parser = argparse.ArgumentParser(prog="trackway.deploy.drain", description="Empty this Ray node before it stops.")
    parser.add_argument("--timeout", type=float, default=660.0, help="longest wait, in seconds (default: 660)")
    timeout_s, began = parser.parse_args(arguments).timeout, time.monotonic()
    try:
        left = drain(_this_node(), _cluster(), timeout_s)
    except UserError as error:
        print(f"drain: {error}", file=sys.stderr)
        return 1
    how = f"not empty ({', '.join(left)})" if left else "empty"
    print(f"drain: {how} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
