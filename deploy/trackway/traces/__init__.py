"""Reading traces: finding, drawing, comparing and verifying the traces of trajectories."""

from collections.abc import Sequence

from trackway.traces import rules
from trackway.traces.mlflow_store import MlflowStore, experiment_ids, search
from trackway.traces.store import TraceFilter, TraceKind, TraceStore
from trackway.traces.tree import SpanNode, TraceTree
from trackway.wire.trajectory import Turn

__all__ = [
    "MlflowStore",
    "SpanNode",
    "TraceFilter",
    "TraceKind",
    "TraceStore",
    "TraceTree",
    "experiment_ids",
    "missing_parts",
    "search",
]


def missing_parts(tree: TraceTree, turns: Sequence[Turn]) -> list[str]:
    """The gaps of a scored trajectory's trace. Empty for a complete tree of separate services."""
    return [*rules.tree_gaps(tree, rules.Expected.of(turns, rewards=1)), *rules.shared_processes(tree)]
