"""Sets up the tracking of a run's process, and checks before that each logger in `trainer.logger` can be used."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trackway.run_config import RunConfig
from trackway.system.process import Experimental, warn_experimental
from trackway.trainer.delivery.jobs import Delivery, DeliveryThread
from trackway.trainer.delivery.mlflow_run import MlflowRun
from trackway.trainer.delivery.sinks import QueuedSink, Sink, TensorboardRun
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.undelivered import sentences
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import BackendSummary, MetricsRow

if TYPE_CHECKING:
    from wandb import Run


INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 45.0
"""Shorter than the worker's wait for tracking at the end. Unsent data stays in the run's folder."""


class WandbRun:
    """A W&B run with the id of the Trackway run, so that a resumed run continues in it.

    W&B itself reads WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL and similar variables. Without an API key, or when W&B
    does not answer, the run is recorded offline in the run's folder.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.id = config.trackway.wandb_run_id or folder.info().uid
        self._folder = folder
        self._config = config
        self._run: Run | None = None

    def open(self) -> None:
        """Start or resume the W&B run."""
        import wandb

        mode = os.environ.get("WANDB_MODE")
        offline = mode == "offline" or (not mode and not wandb.login(prompt=False, verify=False))
        try:
            self._run = self._begin(offline)
        except wandb.Error as error:
            if offline:
                raise
            offline = True
            logger.warning("W&B: %s: %s; its metrics stay in the run's folder", type(error).__name__, error)
            wandb.teardown()  # otherwise the id stays in use
            self._run = self._begin(offline)
        if not offline:
            warn_experimental(Experimental.WANDB)
        else:
            logger.info("W&B is offline: `wandb sync %s/wandb/offline-run-*` sends the metrics", self._folder.path)

    def log(self, row: MetricsRow) -> None:
        """Add the row unless W&B has it. Committed at once, since a row is complete."""
        run = self._started()
        if row.step >= run.starting_step:
            run.log(dict(row.data), step=row.step, commit=True)

    def finish(self, status: str) -> None:
        """End the W&B run. A stopped run does not count as failed."""
        self._started().finish(exit_code=1 if status == "FAILED" else 0)

    def _begin(self, offline: bool) -> "Run":
        import wandb

        trainer = self._config.trainer
        code = {service: own.model_dump(mode="json") for service, own in self._folder.info().code.items()}
        return wandb.init(
            project=trainer.project_name,
            name=trainer.experiment_name,
            id=self.id,
            dir=self._folder.path,
            config={**self._config.model_dump(mode="json"), "own_code": code},
            mode="offline" if offline else None,
            resume=None if offline else "allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S),
        )

    def _started(self) -> "Run":
        if self._run is None:
            raise RuntimeError("the W&B run did not start")
        return self._run


logger = logging.getLogger("trackway.trainer")

PACKAGES = ("mlflow", "tensorboard", "wandb")
"""Loggers that need the package of the same name, installed by the extra of the same name."""
FIRST_ANSWER_S = 20.0
"""Longest wait for MLflow's id of the run, which lets traces link to the run from the start."""


class Tracking:
    """A run's tracking: MLflow (`run`, None when it is off), deliveries to it and to Weave, and the other backends."""

    def __init__(self, run: MlflowRun | None = None, others: Sequence[QueuedSink] = ()) -> None:
        self.run = run
        self._others = others
        self._threads: list[tuple[Delivery, DeliveryThread]] = []
        self._mlflow = None if run is None else self._deliver(run)

    @property
    def backends(self) -> list[Sink]:
        """The sinks outside this process and the run's folder."""
        return [*([] if self._mlflow is None else [self._mlflow]), *self._others]

    def deliver(self, delivery: Delivery) -> Callable[[], None]:
        """Start sending a further backend's queue, until `close`. Returns a function that signals new data."""
        return self._deliver(delivery).wake

    def wake_mlflow(self) -> None:
        """Signal new data for MLflow."""
        if self._mlflow is not None:
            self._mlflow.wake()

    def wait_for_ids(self, deadline_s: float = FIRST_ANSWER_S) -> None:
        """Wait until MLflow has returned its ids of the run, or could not be reached."""
        if self._mlflow is not None and self.run is not None:
            self._mlflow.wait_for_first_attempt(deadline_s)
            if self.run.run_id is None:
                logger.warning(
                    "MLflow at %s has not answered yet: its data is kept on disk until it does", self.run.uri
                )

    @property
    def ids(self) -> dict[str, str | None]:
        """MLflow's ids of the run, for its state. Empty when MLflow is off."""
        return {} if self.run is None else self.run.ids

    def catch_up(self, rows: Sequence[MetricsRow]) -> None:
        """Send the rows that a killed process may have left unsent. The run continues after the last of them."""
        for row in rows:
            for sink in self._others:
                sink.log(row)
        if self.run is not None:
            self.run.rewind(rows)
            self.wake_mlflow()

    def summaries(self) -> list[BackendSummary]:
        """For each backend, the counts of waiting and lost data."""
        return [*(delivery.summary() for delivery, _ in self._threads), *(sink.summary() for sink in self._others)]

    def close(self, status: str, deadline_s: float) -> list[BackendSummary]:
        """End each backend's run with a status and send the queued data until the deadline; the final summaries."""
        if self.run is not None:
            self.run.end(status)
        endings: list[Callable[[], None]] = [
            *(lambda thread=thread: thread.close(deadline_s) for _, thread in self._threads),
            *(lambda sink=sink: sink.close(status, deadline_s) for sink in self._others),
        ]
        # In parallel, so that an unreachable backend does not use up the others' time.
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
    """The run's tracking, with MLflow's ids written to the run's folder once they are known. Blocking."""
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


def check_loggers(config: RunConfig, default_mlflow_uri: str | None) -> None:
    """Raise TrackwayError(INVALID_REQUEST) for loggers whose package is missing, and for MLflow without a URI."""
    missing = missing_for_loggers(config, default_mlflow_uri)
    if missing:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, "; ".join(missing), key=missing[0].partition(":")[0])


def missing_for_loggers(config: RunConfig, default_mlflow_uri: str | None) -> list[str]:
    """A message for each package or setting that a named logger lacks in the trainer's environment."""
    names = config.trainer.logger
    missing = [
        f"trainer.logger: expected the package {name} where the trainer runs, found none; "
        f"pip install 'trackway[{name}]', or leave {name} out"
        for name in names
        if name in PACKAGES and not _installed(name)
    ]
    if "mlflow" in names and not (config.trackway.mlflow_uri or default_mlflow_uri):
        missing.append(
            "trainer.logger: expected a tracking URI for mlflow, got none; set trackway.mlflow_uri, or "
            "MLFLOW_TRACKING_URI in the environment of the trainer service and restart it, or leave mlflow out"
        )
    return missing


def _installed(package: str) -> bool:
    spec = find_spec(package)
    return (
        spec is not None and spec.origin is not None
    )  # a plain folder of that name, such as W&B's output folder, has no origin
