"""Sends the unsent data of ended runs, left because MLflow or Weave was unreachable or the process was killed.

Any trainer service can do this: the service that owned the run, or a later one for the same outputs folder.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trackway.run_config.models import weave_project
from trackway.system.waits import Backoff
from trackway.tracing import TracingSettings
from trackway.trainer.delivery.jobs import Delivery, Later
from trackway.trainer.delivery.mlflow_run import NAME as MLFLOW
from trackway.trainer.delivery.mlflow_run import STATUS, MlflowRun, mlflow_summary, read_state, tracking_folder
from trackway.trainer.delivery.weave_feedback import NAME as WEAVE
from trackway.trainer.delivery.weave_feedback import WeaveFeedback, weave_summary
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunInfo


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


BACKOFF = Backoff(first_s=5.0, longest_s=300.0)
"""Between attempts for a run whose backend accepts nothing."""

logger = logging.getLogger("trackway.trainer")


class Leftovers:
    """A thread that sends the unsent data of ended runs. `offer` passes the runs to check."""

    def __init__(self, outputs: Path, settings: TracingSettings) -> None:
        self._outputs = outputs
        self._settings = settings
        self._offered: Sequence[RunInfo] = ()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._due: dict[str, tuple[float, int]] = {}
        """Run name -> the time of the next attempt (time.monotonic), and the failed attempts so far."""
        self._thread: threading.Thread | None = None

    def offer(self, runs: Sequence[RunInfo]) -> None:
        """Check these runs for unsent data. Returns immediately."""
        with self._changed:
            self._offered = [info for info in runs if info.state in STATUS]
            if self._thread is None and self._offered:
                self._thread = threading.Thread(target=self._work, name="leftovers", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop after the current request."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _work(self) -> None:
        while not self._is_stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._offered or self._is_stopping)
                runs, self._offered = self._offered, ()
            for info in runs:
                if self._is_stopping:
                    return
                self._send(info)

    def _send(self, info: RunInfo) -> None:
        due, failures = self._due.get(info.run, (0.0, 0))
        if time.monotonic() < due:
            return
        try:
            for delivery in left_by(RunFolder(self._outputs / info.run), info, self._settings):
                try:
                    while not self._is_stopping and delivery.advance():
                        failures = 0
                finally:
                    delivery.close()
            self._due.pop(info.run, None)
        except Exception as error:
            # Any error: the failure of one run must not block the other runs.
            if not isinstance(error, Later) or not failures:
                logger.warning("run %s: its unsent data stays on disk: %s: %s", info.run, type(error).__name__, error)
            self._due[info.run] = (time.monotonic() + BACKOFF.pause_s(failures + 1), failures + 1)


def left_by(folder: RunFolder, info: RunInfo, settings: TracingSettings) -> Iterator[Delivery]:
    """The deliveries of an ended run that still have unsent data."""
    queues = tracking_folder(folder)
    if not queues.is_dir():
        return
    state = read_state(folder)
    status = STATUS[info.state]
    if (queues / f"{MLFLOW}.json").is_file() and mlflow_summary(folder, status).waiting:
        config = folder.config()
        run = MlflowRun(folder, config, config.trackway.mlflow_uri or settings.mlflow_uri or state.uri)
        run.end(status, int((folder.path / "state.json").stat().st_mtime * 1000))
        yield run
    if weave_summary(queues).waiting:
        weave = weave_feedback(folder, weave_project(folder.config(), settings.weave_api_key), settings)
        if weave is not None:
            yield weave


def weave_feedback(folder: RunFolder, project: str | None, settings: TracingSettings) -> WeaveFeedback | None:
    """The feedback delivery of a run whose traces are in Weave's `project`, or None without a project or an API key."""
    key = settings.weave_api_key
    if key is None or project is None:
        return None
    return WeaveFeedback(tracking_folder(folder), settings.weave_url, project, key)
