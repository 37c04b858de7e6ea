"""Reading trajectories' traces back: finding them, drawing them, comparing two, checking that each is whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trackway.traces import rules
from trackway.traces.mlflow_store import MlflowStore, experiment_ids, search, tag_filter, tree_of
from trackway.traces.store import TraceFilter, TraceKind, TraceStore
from trackway.traces.tree import SpanNode, TraceTree
from trackway.wire.trajectory import Turn

if TYPE_CHECKING:
    from mlflow.entities import Trace

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
    "tag_filter",
]


def missing_parts(trace: "Trace", turns: Sequence[Turn]) -> list[str]:
    """What the trace of a scored trajectory lacks in MLflow; empty for a whole tree of five separate services."""
    tree = tree_of(trace)
    return [*rules.tree_gaps(tree, rules.Expected.of(turns, rewards=1)), *rules.shared_processes(tree)]
