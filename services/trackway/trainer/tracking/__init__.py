"""Metrics logging: console and metrics.jsonl in the run's thread; the other loggers in their own threads.

sinks        the interface of a backend, and the queue in front of it
mlflow_run   the run in MLflow, sent from the files on disk
wandb_run, tensorboard_run   one backend each; the only modules of a service that import it
opening      check of `trainer.logger` before a run starts; the tracking of a run
leftovers    unsent data of ended runs, for MLflow and Weave
summary      counts of data that backends have not received

A slow or unreachable backend delays no training step. For MLflow and Weave, no data is lost either.
"""

from trackway.trainer.tracking.leftovers import Leftovers, weave_feedback
from trackway.trainer.tracking.mlflow_run import MlflowRun
from trackway.trainer.tracking.opening import Tracking, check_loggers, missing_for_loggers, open_tracking
from trackway.trainer.tracking.sinks import ConsoleSink, FileSink, MlflowSink, QueuedSink, Sink
from trackway.trainer.tracking.summary import with_tracking

__all__ = [
    "ConsoleSink",
    "FileSink",
    "Leftovers",
    "MlflowRun",
    "MlflowSink",
    "QueuedSink",
    "Sink",
    "Tracking",
    "check_loggers",
    "missing_for_loggers",
    "open_tracking",
    "weave_feedback",
    "with_tracking",
]
