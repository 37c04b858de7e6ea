"""Drain this Ray node before it stops: `python -m trackway.deploy.drain --timeout 660`, preStop of a worker pod.

The node is marked as draining, as `ray drain-node` does: Serve starts replacement replicas on other nodes, and replicas
here finish their requests. If no node has room for a replacement, the replica is stopped once only its
`graceful_shutdown_timeout_s` is left of the timeout, so the timeout must be the longer of the two.

Requests that entered by this node's proxy and run on another node are not waited for. Their clients retry under the
same idempotency key.

When the whole cluster is deleted, its head goes at the same time. Once the head has been silent for `_SILENCE_S`, the
node's run saves a checkpoint and ends, and the node stops when it has no request in flight.

This process is not a Ray worker and stays small. Its exit status is 0 even if replicas remain, as the pod stops anyway.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path

import psutil
from ray._private.services import canonicalize_bootstrap_address_or_die, find_node_ids
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_pb2 import ActorTableData  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import RayError

from trackway.deploy.probe import asked
from trackway.system.process import UserError

_PREEMPTION = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
_POLL_S = 1.0
_ANSWER_S = 10.0
"""Longest wait for one answer from the cluster's control store."""
_SILENCE_S = 15.0
"""Seconds of the head's silence after which a node stops without it."""
_SAVE_S = 30.0
"""Shortest time for a run to save its checkpoint."""
_SILENT = "the cluster does not answer"
_REPLICA = "SERVE_REPLICA::"
"""Prefix of the actor names of Serve's replicas."""
_REPLICA_PROCESS = "ray::ServeReplica:"
_RUN, _RANK = "trackway.trainer.worker", "trackway.learner.ranks.process"
"""Parts of the command lines of a replica, a run and a learner's rank."""


def drain(node: str, cluster: str, timeout_s: float) -> list[str]:
    """Drain a node and wait until no Serve replica runs on it. Returns the replicas that remain at the timeout.

    If the control store does not answer, for example while the head restarts, it is polled. Once it has been silent for
    `_SILENCE_S`, the node's run saves and ends, and an idle node is not drained any longer.

    Args:
        node: the node's id, hexadecimal.
        cluster: host:port of the control store.
        timeout_s: seconds.

    Raises:
        UserError: Ray refuses.
    """
    watch, end = _Watch(node, cluster, timeout_s), time.monotonic() + timeout_s + _ANSWER_S
    # A daemon thread: creating Ray's client takes 40 s when the store is silent and cannot be interrupted.
    threading.Thread(target=watch.run, daemon=True).start()
    left = [_SILENT]
    while time.monotonic() < end:
        if wait([watch.ended], _POLL_S).done:
            left = watch.ended.result()
            break
        if time.monotonic() > watch.heard + _SILENCE_S:
            _end_trainer(node, end)  # first, since a run keeps the other services busy
            if not _busy(node):
                break
    if left:
        _end_trainer(node, max(end, time.monotonic() + _SAVE_S))
    return left


class _Watch:
    """Asks the control store for the node's replicas until there are none, or until the timeout."""

    def __init__(self, node: str, cluster: str, timeout_s: float) -> None:
        self.heard = time.monotonic()
        """When the store last answered."""
        self.ended: Future[list[str]] = Future()
        """The replicas that remain."""
        self._node, self._cluster, self._timeout_s = node, cluster, timeout_s

    def run(self) -> None:
        """Set `ended`."""
        try:
            self.ended.set_result(asyncio.run(self._poll()))
        except BaseException as error:
            self.ended.set_exception(error)

    async def _poll(self) -> list[str]:
        end, until_ms = time.monotonic() + self._timeout_s, int((time.time() + self._timeout_s) * 1000)
        left, store = [_SILENT], None
        while True:
            try:
                if store is None:
                    store = _draining(self._node, self._cluster, until_ms)
                actors = await store.async_get_all_actor_info(timeout=_ANSWER_S)
                left, self.heard = replicas_on(self._node, actors.values()), time.monotonic()
            except RayError as error:
                print(f"drain: {_SILENT} ({error})", file=sys.stderr)
            if not left or time.monotonic() > end:
                return left
            await asyncio.sleep(_POLL_S)


def _busy(node: str) -> bool:
    """Return whether the node has a request in flight, a replica that starts or stops, or a rank of a run elsewhere."""
    if _processes(node, _RANK) and not _processes(node, _RUN):
        return True
    in_flight, end = list[int](), time.monotonic() + _ANSWER_S
    for path in Path(os.environ.get("TRACKWAY_PROBE_DIR") or os.devnull).glob("*.sock"):
        try:
            in_flight.append(asked(path, end)["in_flight"])
        except (ConnectionRefusedError, FileNotFoundError):
            continue  # its process was killed
        except (OSError, ValueError):
            return True
    return any(in_flight) or len(in_flight) < len(_processes(node, _REPLICA_PROCESS))


def _end_trainer(node: str, end: float) -> None:
    """End the node's trainer, so that its run saves a checkpoint, and wait for the run until `end`."""
    runs = _processes(node, _RUN)
    for trainer in _processes(node, f"{_REPLICA_PROCESS}trainer:"):
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer.terminate()  # it would resume the run
    while any(map(_alive, runs)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if any(map(_alive, runs)):
        print("drain: the run did not end in time; it resumes from its last checkpoint", file=sys.stderr)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _processes(node: str, mark: str) -> list[psutil.Process]:
    """The processes below the node's raylet whose command line contains `mark`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if f"--node_id={node}" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
    return [process for process in found if mark in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _draining(node: str, cluster: str, until_ms: int) -> GcsClient:
    """Start draining the node. Returns the client of the control store."""
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
