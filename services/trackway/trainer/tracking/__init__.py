"""Where metrics go: the console and metrics.jsonl here, and MLflow, W&B and TensorBoard behind a queue.

sinks        what takes a row, and the queue between the run and a backend
loggers      `trainer.logger` before a run starts: is everything there that it names?
mlflow_run, wandb_run, tensorboard_run   one backend each; the only modules of a service that import it
opening      everything of one run

A backend that is slow, full or gone costs counted metrics and never a training step.
"""

from trackway.trainer.tracking.loggers import check_loggers
from trackway.trainer.tracking.mlflow_run import MlflowRun, MlflowSink, open_mlflow
from trackway.trainer.tracking.opening import Tracking, open_tracking
from trackway.trainer.tracking.sinks import ConsoleSink, FileSink, QueuedSink, Sink

__all__ = [
    "ConsoleSink",
    "FileSink",
    "MlflowRun",
    "MlflowSink",
    "QueuedSink",
    "Sink",
    "Tracking",
    "check_loggers",
    "open_mlflow",
    "open_tracking",
]
