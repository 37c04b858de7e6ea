"""Where metrics go: the console and metrics.jsonl here, and MLflow, W&B and TensorBoard in threads of their own.

sinks        what takes a row, and the queue between the run and a backend
loggers      `trainer.logger` before a run starts: is everything there that it names?
mlflow_run   the run in MLflow, from what is on disk
wandb_run, tensorboard_run   one backend each; the only modules of a service that import it
opening      everything of one run
leftovers    what ended runs left unsent, for MLflow and Weave
summary      what backends do not have

A backend that is slow or away costs no training step, and of MLflow and Weave no data.
"""

from trackway.trainer.tracking.leftovers import Leftovers, weave_feedback
from trackway.trainer.tracking.loggers import check_loggers, missing_for_loggers
from trackway.trainer.tracking.mlflow_run import MlflowRun
from trackway.trainer.tracking.opening import Tracking, open_tracking
from trackway.trainer.tracking.sinks import ConsoleSink, FileSink, MlflowSink, QueuedSink, Sink
from trackway.trainer.tracking.summary import sentences, with_tracking

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
    "sentences",
    "weave_feedback",
    "with_tracking",
]
