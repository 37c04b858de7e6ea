"""Counts of a run's data that backends have not received or have lost, for `/runs`, `/metrics` and log messages."""

import logging

from trackway.trainer.delivery.weave_feedback import NAME as WEAVE
from trackway.trainer.delivery.weave_feedback import weave_summary
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.mlflow_run import NAME as MLFLOW
from trackway.trainer.tracking.mlflow_run import STATUS, mlflow_summary, read_state, tracking_folder
from trackway.wire.trainer import RunInfo

logger = logging.getLogger("trackway.trainer")


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
