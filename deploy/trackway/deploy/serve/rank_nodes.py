"""The other nodes of a learner's ranks, as seen by the process of a run, which is a Ray driver for that.

A placement group reserves a node for each part of the ranks but the first. An actor on each node starts the ranks as
processes, so that a rank is the same everywhere. They end with their actor, and group and actors with the driver,
however that ends.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trackway.learner.ranks.launch import LOST, RankError, handed_over, start_here
from trackway.run_config.placement import NODE_RESOURCE, Placement

START_S = 120.0
"""Longest wait for the actors to start."""
ANSWER_S = 10.0
"""Longest wait for a node's answer about a rank. A node that is silent for longer is lost."""
REMOVAL_S = 10.0
"""Longest wait for Ray to free the nodes."""
POLL_S = 0.05

logger = logging.getLogger("trackway.trainer")


class NodeRanks:
    """The actor of a node: the ranks there."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def address(self) -> str:
        """The node's address in the cluster."""
        return ray.util.get_node_ip_address()

    def start(self, rank: int, arguments: Sequence[str], paths: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a rank. The other arguments are as in `start_here`."""
        self._processes[rank] = start_here(arguments, paths, environment)

    def poll(self, rank: int) -> int | None:
        """The exit status of a rank. None while it runs."""
        return self._processes[rank].poll()

    def kill(self, rank: int) -> None:
        """Ends a rank at once."""
        self._processes[rank].kill()


class Node:
    """A node, which is lost once it fails to answer."""

    def __init__(self, actor: "ActorHandle[Any]") -> None:
        self.actor = actor
        self.is_lost = False

    def poll(self, rank: int) -> int | None:
        """The exit status of a rank. None while it runs."""
        if not self.is_lost:
            try:
                return cast("int | None", ray.get(self.actor.poll.remote(rank), timeout=ANSWER_S))
            except RayError as error:
                logger.warning("the node of rank %d of the learner is lost: %s", rank, str(error).splitlines()[0])
                self.is_lost = True
        return LOST


class NodeProcess:
    """A `RankProcess` on another node."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node = node
        self._rank = rank
        self._status: int | None = None

    def poll(self) -> int | None:
        """Implement `RankProcess.poll`."""
        if self._status is None:
            self._status = self._node.poll(self._rank)
        return self._status

    def wait(self, timeout: float) -> int:
        """Implement `RankProcess.wait`."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout)
            time.sleep(POLL_S)
        return status

    def kill(self) -> None:
        """Implement `RankProcess.kill`."""
        if self._status is None and not self._node.is_lost:
            self._node.actor.kill.remote(self._rank)


class RayNodes:
    """A `RankLauncher` on nodes of the Ray cluster that this machine belongs to."""

    def __init__(self, placement: Placement, *, with_gpus: bool, deadline_s: float) -> None:
        """Reserves the nodes. Raises ValueError when they are not there within `deadline_s`, RankError when one dies.

        The ranks of the first node are not this one's.
        """
        self._placement = placement
        self._connects = not ray.is_initialized()
        if self._connects:
            ray.init(address="auto")
        bundle = placement.bundle(with_gpus)
        self._group = placement_group([bundle] * placement.others, strategy="STRICT_SPREAD")
        self._nodes: list[Node] = []
        try:
            if not self._group.wait(deadline_s):
                raise ValueError(_shortage(placement, with_gpus, deadline_s))
            self._nodes = [Node(self._actor(index, bundle)) for index in range(placement.others)]
            addresses = [node.actor.address.remote() for node in self._nodes]
            self.hosts: Sequence[str] = [ray.util.get_node_ip_address(), *ray.get(addresses, timeout=START_S)]
        except RayError as error:
            self.close()
            raise RankError(f"a node of the learner's ranks did not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def _actor(self, index: int, bundle: Mapping[str, float]) -> "ActorHandle[Any]":
        options: dict[str, Any] = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "resources": {NODE_RESOURCE: 1},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }
        return cast("ActorHandle[Any]", ray.remote(NodeRanks).options(**options).remote())

    def start(self, rank: int, arguments: Sequence[str]) -> NodeProcess:
        """Implement `RankLauncher.start`."""
        node = self._nodes[self._placement.node(rank) - 1]
        handed = handed_over(os.environ)
        try:
            ray.get(node.actor.start.remote(rank, list(arguments), sys.path, handed), timeout=START_S)
        except (RayError, OSError) as error:
            host = self.hosts[self._placement.node(rank)]
            raise RankError(f"rank {rank} of the learner on node {host} was not started: {error}") from error
        return NodeProcess(node, rank)

    def close(self) -> None:
        """Implement `RankLauncher.close`."""
        try:
            for node in self._nodes:
                ray.kill(node.actor)
            remove_placement_group(self._group)
            end = time.monotonic() + REMOVAL_S
            while placement_group_table(self._group)["state"] != "REMOVED" and time.monotonic() < end:
                time.sleep(POLL_S)
        except RayError:
            logger.warning("the nodes of the learner's ranks were not given back; Ray does it later", exc_info=True)
        if self._connects:
            ray.shutdown()


def _shortage(placement: Placement, with_gpus: bool, deadline_s: float) -> str:
    offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    expected = placement.shortage(offers, with_gpus)
    if expected:
        return f"{expected} in {deadline_s:g} s; add such nodes, or lower trainer.nnodes"
    return (
        f"trainer.nnodes: expected {placement.described(with_gpus)}, free within {deadline_s:g} s, got some in use; "
        "wait until another run ends, or add nodes"
    )
