"""Counts of a run's data that backends have not received or have lost, for `/runs`, `/metrics` and log messages."""

import logging

from trackway.trainer.delivery.weave_feedback import NAME as WEAVE
from trackway.trainer.delivery.weave_feedback import weave_summary
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.mlflow_run import NAME as MLFLOW
from trackway.trainer.tracking.mlflow_run import STATUS, mlflow_summary, read_state, tracking_folder
from trackway.wire.trainer import BackendSummary, RunInfo

logger = logging.getLogger("trackway.trainer")

_NAMES = {"mlflow": "MLflow", "weave": "Weave", "wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "Trackio"}


def with_tracking(info: RunInfo, folder: RunFolder) -> RunInfo:
    """The run with the current state of its backends, which may receive data long after the run's end."""
    try:
        return _with_tracking(info, folder)
    except OSError as error:
        logger.warning("run %s: the state of its backends cannot be read: %s", info.run, error)
        return info


def _with_tracking(info: RunInfo, folder: RunFolder) -> RunInfo:
    queues = tracking_folder(folder)
    summaries = {summary.backend: summary for summary in info.tracking}
    changes: dict[str, object] = {}
    if (queues / f"{MLFLOW}.json").is_file():
        state = read_state(folder)
        changes = {"mlflow_uri": state.uri, "experiment_id": state.experiment_id, "run_id": state.run_id}
        summaries[MLFLOW] = mlflow_summary(folder, STATUS.get(info.state, "RUNNING"))
    if (queues / f"{WEAVE}_feedback").is_dir():
        summaries[WEAVE] = weave_summary(queues)
    return info.model_copy(update={**changes, "tracking": list(summaries.values())})


def sentences(summary: BackendSummary) -> list[str]:
    """A sentence about waiting data and one about lost data; empty when the backend has everything."""
    name, messages = _NAMES.get(summary.backend, summary.backend), []
    if summary.waiting:
        parts = [
            _count(summary.rows_waiting, "row", "of metrics"),
            _count(summary.feedback_waiting, "value", "of feedback"),
            "the run's final status" if summary.end_waiting else "",
        ]
        why = f" ({summary.waits_for})" if summary.waits_for else ""
        messages.append(f"{' and '.join(filter(None, parts))} not yet in {name}{why}: kept on disk and sent later")
    if summary.lost:
        parts = [
            _count(summary.metrics_lost, "value", "of metrics"),
            _count(summary.feedback_lost, "value", "of feedback"),
        ]
        why = f": {summary.lost_because}" if summary.lost_because else ""
        messages.append(f"{' and '.join(filter(None, parts))} lost for {name}{why}")
    return messages


def _count(number: int, noun: str, of: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)} {of}" if number else ""
