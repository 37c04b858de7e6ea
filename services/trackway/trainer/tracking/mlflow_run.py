"""The run in MLflow; spans go there as plain OTLP and need none of this."""

import logging
import os
import time
from collections.abc import Mapping

from trackway.tracing import local_mlflow
from trackway.trainer.background import Background
from trackway.wire.trainer import MetricsRow

logger = logging.getLogger("trackway.trainer")

PARAMS_PER_CALL = 100
"""MLflow refuses more params in one batch."""


class MlflowSink:
    """Metrics of the MLflow run; `@` in a name becomes `_at_`, which MLflow allows."""

    def __init__(self, run: "MlflowRun", background: Background) -> None:
        self._run = run
        self._background = background

    def log(self, row: MetricsRow) -> None:
        """Queue the row."""
        self._background.submit(lambda: self._run.log_metrics(row))


class MlflowRun:
    """One run of an MLflow experiment, new or gone on with. Every method but the properties is a call to the server.

    A local database is spoken to through the one server that traces go to as well: two would collide. Raises mlflow's
    MlflowException when the server refuses or cannot be reached, LocalMlflowError when a local one does not start.
    """

    def __init__(self, uri: str, experiment: str, name: str, run_id: str | None = None) -> None:
        # mlflow's defaults (7 tries, 120 s each) outlast any deadline of ours; a user's own values are kept.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        self.uri = uri
        self._client = MlflowClient(tracking_uri=local_mlflow.server_uri(uri))
        self.experiment_id: str = self.experiment(experiment)
        """MLflow's id of the experiment."""
        self.is_new = run_id is None
        """Whether this run began here, and so needs its params."""
        self.run_id: str = run_id or self._client.create_run(self.experiment_id, run_name=name).info.run_id
        """MLflow's id of the run."""
        if not self.is_new:
            self._client.update_run(self.run_id, status="RUNNING")

    def log_params(self, params: Mapping[str, object]) -> None:
        """Record the configuration."""
        from mlflow.entities import Param

        entities = [Param(key, str(value)) for key, value in params.items()]
        for start in range(0, len(entities), PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=entities[start : start + PARAMS_PER_CALL])

    def log_metrics(self, row: MetricsRow) -> None:
        """Record the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name.replace("@", "_at_"), value, now, row.step) for name, value in row.data.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def finish(self, status: str) -> None:
        """End the run: FINISHED, FAILED, or KILLED for one that was stopped."""
        self._client.set_terminated(self.run_id, status=status)

    def experiment(self, name: str) -> str:
        """MLflow's id of the experiment of that name, which is made when there is none."""
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id


def open_mlflow(uri: str | None, experiment: str, name: str, run_id: str | None) -> MlflowRun | None:
    """The MLflow run, or None, with one line that says why: no URI, or a server that does not answer."""
    if not uri:
        logger.info("MLflow is off: set trackway.mlflow_uri or MLFLOW_TRACKING_URI to switch it on")
        return None
    try:
        return MlflowRun(uri, experiment, name, run_id)
    except Exception as error:
        # mlflow raises many kinds here, ImportError included; none of them is worth a training run.
        logger.warning("MLflow is off: %s at %s: %s", type(error).__name__, uri, error)
        return None
