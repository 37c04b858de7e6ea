"""How the ranks of a learner are divided over nodes, and what a Ray node offers for them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

NODE_RESOURCE = "trackway_learner"
"""Ray resource of the nodes that may take ranks; each offers 1. The trainer's own node does not offer it."""


class Placement(NamedTuple):
    """Ranks in equal parts on nodes. The first part is on the node of the run's own process."""

    ranks: int = 1
    nodes: int = 1

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def others(self) -> int:
        """Nodes besides the trainer's own."""
        return self.nodes - 1

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.per_node

    def local_rank(self, rank: int) -> int:
        """Return which of its node's ranks a rank is, and so its GPU."""
        return rank % self.per_node

    def bundle(self, with_gpus: bool) -> dict[str, float]:
        """Resources that the ranks of another node need of Ray: a CPU each, and on GPUs a GPU each."""
        each = float(self.per_node)
        return {NODE_RESOURCE: 1.0, "CPU": each, **({"GPU": each} if with_gpus else {})}

    def shortage(self, offers: Iterable[Mapping[str, float]], with_gpus: bool) -> str:
        """Error message if too few nodes offer the bundle; else an empty string.

        `offers` are all resources of each Ray node, free or not.
        """
        bundle = self.bundle(with_gpus)
        able = sum(all(offer.get(name, 0.0) >= most for name, most in bundle.items()) for offer in offers)
        if able >= self.others:
            return ""
        return f"trainer.nnodes: expected {self.described(with_gpus)}, got {able or 'none'}"

    def described(self, with_gpus: bool) -> str:
        """The other nodes in words."""
        bundle = ", ".join(f"{name} {most:g}" for name, most in self.bundle(with_gpus).items())
        many = self.others > 1
        return f"{self.others} Ray node{'s' * many} besides the trainer's, offering {bundle}{' each' * many}"
