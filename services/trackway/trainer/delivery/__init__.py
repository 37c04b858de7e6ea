"""Delivery of metrics, run status and trace feedback to trackers, and the loggers of a run.

sinks          console, metrics.jsonl, TensorBoard. The interface of a backend, and the queue in front of it
mlflow_run     the run in MLflow, sent from the files on disk
opening        check of `trainer.logger` before a run starts. The run in W&B, and the tracking of a run
leftovers      unsent data of ended runs, for MLflow and Weave, and its counts
feedback_queue, jobs   queues on disk, and the thread that sends them

A slow or unreachable backend delays no training step. For MLflow and Weave, no data is lost either: all requests are
idempotent. Imported by `traces`.
"""

from trackway.trainer.delivery.leftovers import Leftovers, with_tracking
from trackway.trainer.delivery.mlflow_run import MlflowRun
from trackway.trainer.delivery.opening import Tracking, check_loggers, missing_for_loggers, open_tracking
from trackway.trainer.delivery.sinks import ConsoleSink, FileSink, QueuedSink, Sink

__all__ = [
    "ConsoleSink",
    "FileSink",
    "Leftovers",
    "MlflowRun",
    "QueuedSink",
    "Sink",
    "Tracking",
    "check_loggers",
    "missing_for_loggers",
    "open_tracking",
    "with_tracking",
]
