"""Opens what `trainer.logger` names, once for a run's process."""

import logging
import threading
from collections.abc import Callable, Sequence

from trackway.trainer.config import RunConfig
from trackway.trainer.delivery.jobs import Delivery, DeliveryThread
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.mlflow_run import MlflowRun
from trackway.trainer.tracking.sinks import MlflowSink, QueuedSink, Sink
from trackway.trainer.tracking.summary import sentences
from trackway.trainer.tracking.tensorboard_run import TensorboardRun
from trackway.trainer.tracking.wandb_run import WandbRun
from trackway.wire.trainer import BackendSummary, MetricsRow

logger = logging.getLogger("trackway.trainer")

FIRST_ANSWER_S = 20.0
"""Longest wait for MLflow's id of the run, with which its traces are linked to it at once."""


class Tracking:
    """The run in MLflow, None when that is off, what is delivered to it and to Weave, and the other backends."""

    def __init__(self, run: MlflowRun | None = None, others: Sequence[QueuedSink] = ()) -> None:
        self.run = run
        self._others = others
        self._threads: list[tuple[Delivery, DeliveryThread]] = []
        self._mlflow = None if run is None else self._deliver(run)

    @property
    def backends(self) -> list[Sink]:
        """Where metrics go beyond this process and the run's folder."""
        first: list[Sink] = [] if self._mlflow is None else [MlflowSink(self._mlflow)]
        return [*first, *self._others]

    def deliver(self, delivery: Delivery) -> Callable[[], None]:
        """Send what waits for a further backend, until `close`; what is returned says that something new waits."""
        return self._deliver(delivery).wake

    def wake_mlflow(self) -> None:
        """Something new waits for MLflow."""
        if self._mlflow is not None:
            self._mlflow.wake()

    def wait_for_ids(self, deadline_s: float = FIRST_ANSWER_S) -> None:
        """Wait until MLflow has said its ids of the run, or could not be reached."""
        if self._mlflow is not None and self.run is not None:
            self._mlflow.wait_for_first_attempt(deadline_s)
            if self.run.run_id is None:
                logger.warning("MLflow at %s has not answered yet: what is meant for it waits on disk", self.run.uri)

    @property
    def ids(self) -> dict[str, str | None]:
        """MLflow's ids of the run, for its state; empty when MLflow is off."""
        return {} if self.run is None else self.run.ids

    def catch_up(self, rows: Sequence[MetricsRow]) -> None:
        """The run goes on after these rows: send what a killed process may have left unsent."""
        for row in rows:
            for sink in self._others:
                sink.log(row)
        if self.run is not None:
            self.run.rewind(rows)
            self.wake_mlflow()

    def summaries(self) -> list[BackendSummary]:
        """What each backend does not have."""
        return [*(delivery.summary() for delivery, _ in self._threads), *(sink.summary() for sink in self._others)]

    def close(self, status: str, deadline_s: float) -> list[BackendSummary]:
        """End each backend's run with a status and send what waits, within the deadline; what they do not have then."""
        if self.run is not None:
            self.run.end(status)
        endings: list[Callable[[], None]] = [
            *(lambda thread=thread: thread.close(deadline_s) for _, thread in self._threads),
            *(lambda sink=sink: sink.close(status, deadline_s) for sink in self._others),
        ]
        # Side by side: a backend that is away must not take the others' time.
        threads = [threading.Thread(target=ending) for ending in endings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        summaries = self.summaries()
        for summary in summaries:
            for sentence in sentences(summary):
                logger.warning(sentence)
        return summaries

    def _deliver(self, delivery: Delivery) -> DeliveryThread:
        thread = DeliveryThread(delivery)
        self._threads.append((delivery, thread))
        return thread


def open_tracking(folder: RunFolder, config: RunConfig, default_uri: str | None) -> Tracking:
    """The run's tracking, whose MLflow ids stand in the run's folder as soon as MLflow says them. Blocking."""
    trainer = config.trainer
    uri = config.trackway.mlflow_uri or default_uri
    if not uri:
        logger.info("MLflow is off: set trackway.mlflow_uri or MLFLOW_TRACKING_URI to switch it on")
    others: list[QueuedSink] = []
    if "wandb" in trainer.logger:
        others.append(QueuedSink("wandb", WandbRun(folder, config)))
    if "tensorboard" in trainer.logger:
        others.append(QueuedSink("tensorboard", TensorboardRun(folder.path)))
    tracking = Tracking(MlflowRun(folder, config, uri) if uri else None, others)
    tracking.wait_for_ids()
    if tracking.ids:
        folder.update(**tracking.ids)
    return tracking
