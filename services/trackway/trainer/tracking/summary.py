"""What the backends of a run do not have yet, or will never have: for `/runs`, for people, for `/metrics`."""

import logging

from trackway.trainer.delivery.weave_feedback import NAME as WEAVE
from trackway.trainer.delivery.weave_feedback import weave_summary
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.mlflow_run import NAME as MLFLOW
from trackway.trainer.tracking.mlflow_run import STATUS, mlflow_summary, read_state, tracking_folder
from trackway.wire.trainer import BackendSummary, RunInfo

logger = logging.getLogger("trackway.trainer")

_NAMES = {"mlflow": "MLflow", "weave": "Weave", "wandb": "W&B", "tensorboard": "TensorBoard"}


def with_tracking(info: RunInfo, folder: RunFolder) -> RunInfo:
    """The run with what its backends have by now, which may be sent long after its end."""
    try:
        return _with_tracking(info, folder)
    except OSError as error:
        logger.warning("run %s: what its backends lack cannot be read: %s", info.run, error)
        return info


def _with_tracking(info: RunInfo, folder: RunFolder) -> RunInfo:
    kept = tracking_folder(folder)
    now = {one.backend: one for one in info.tracking}
    changes: dict[str, object] = {}
    if (kept / f"{MLFLOW}.json").is_file():
        state = read_state(folder)
        changes = {"mlflow_uri": state.uri, "experiment_id": state.experiment_id, "run_id": state.run_id}
        now[MLFLOW] = mlflow_summary(folder, STATUS.get(info.state, "RUNNING"))
    if (kept / f"{WEAVE}_feedback").is_dir():
        now[WEAVE] = weave_summary(kept)
    return info.model_copy(update={**changes, "tracking": list(now.values())})


def sentences(summary: BackendSummary) -> list[str]:
    """A sentence for what waits and one for what was lost; none when the backend has everything."""
    name, said = _NAMES.get(summary.backend, summary.backend), []
    if summary.waiting:
        parts = [
            _count(summary.rows_waiting, "row", "of metrics"),
            _count(summary.feedback_waiting, "value", "of feedback"),
            "how the run ended" if summary.end_waiting else "",
        ]
        why = f" ({summary.waits_for})" if summary.waits_for else ""
        said.append(f"{' and '.join(filter(None, parts))} not yet in {name}{why}: kept on disk and sent later")
    if summary.lost:
        parts = [
            _count(summary.metrics_lost, "value", "of metrics"),
            _count(summary.feedback_lost, "value", "of feedback"),
        ]
        why = f": {summary.lost_because}" if summary.lost_because else ""
        said.append(f"{' and '.join(filter(None, parts))} lost for {name}{why}")
    return said


def _count(number: int, noun: str, of: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)} {of}" if number else ""
