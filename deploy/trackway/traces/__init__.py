"""Reading traces: finding, drawing, comparing and verifying the traces of trajectories."""

from trackway.traces.mlflow_store import MlflowStore, experiment_ids
from trackway.traces.store import TraceFilter, TraceKind, TraceStore
from trackway.traces.tree import SpanNode, TraceTree

__all__ = [
    "MlflowStore",
    "SpanNode",
    "TraceFilter",
    "TraceKind",
    "TraceStore",
    "TraceTree",
    "experiment_ids",
]
