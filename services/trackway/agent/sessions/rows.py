"""The token graph as training rows: each path from a root to a leaf is a row, each sampled token trains once.

A sampled node is trained in the first path that holds it, and is context in the others. Auxiliary calls are left out,
and so are answers that reached no client, unless a later call continues them. Guided tokens are context: the learner
has no grammar, and gives them other probabilities than the engine did.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trackway.wire.sessions.graph import GraphNode, NodeKind
from trackway.wire.trajectory import WeightSpan


class TrainedTurn(NamedTuple):
    """Place of a sampled node in the response of a row."""

    node: GraphNode
    start: int
    end: int


class GraphRow(NamedTuple):
    """One path of the graph; fields as in Trajectory."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    weight_versions: list[WeightSpan]
    turns: list[TrainedTurn]
    """The sampled nodes that are trained in this row, and the guided ones that no earlier row has."""
    nodes: list[GraphNode]


def training_rows(nodes: Sequence[GraphNode]) -> list[GraphRow]:
    """The rows of a graph, in the order in which their last turns were sampled; empty without a sampled token."""
    continued: set[int] = set()
    for node in reversed(nodes):
        if node.kind is NodeKind.SAMPLED and (node.delivered or node.id in continued):
            continued.update(_ancestors(node, nodes))
    trained: set[int] = set()
    rows: list[GraphRow] = []
    for node in nodes:
        if node.kind is NodeKind.SAMPLED and node.delivered and node.id not in continued:
            path = [nodes[place] for place in (*reversed(_ancestors(node, nodes)), node.id)]
            row = _row(path, trained)
            if any(turn.node.ids for turn in row.turns):
                rows.append(row)
            trained |= {turn.node.id for turn in row.turns}
    return rows


def _ancestors(node: GraphNode, nodes: Sequence[GraphNode]) -> list[int]:
    """The nodes above this one, the root last."""
    above: list[int] = []
    while node.parent is not None:
        above.append(node.parent)
        node = nodes[node.parent]
    return above


def _row(path: Sequence[GraphNode], trained: set[int]) -> GraphRow:
    root, *rest = path
    row = GraphRow(root.ids, [], [], [], [], [], list(path))
    for node in rest:
        start = len(row.response_ids)
        is_new = node.kind is NodeKind.SAMPLED and node.id not in trained
        trains = is_new and not node.guided
        row.response_ids.extend(node.ids)
        row.response_mask.extend([int(trains)] * len(node.ids))
        row.response_logprobs.extend(node.logprobs if trains else [0.0] * len(node.ids))
        if trains:
            row.weight_versions.extend(span.moved(start) for span in node.weight_versions)
        if is_new:
            row.turns.append(TrainedTurn(node, start, len(row.response_ids)))
    return row
