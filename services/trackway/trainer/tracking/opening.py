"""Opens what `trainer.logger` names, once for a run's process."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trackway.trainer.background import Background
from trackway.trainer.config import RunConfig
from trackway.trainer.config.compose import leaves
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.tracking.mlflow_run import MlflowRun, MlflowSink, open_mlflow
from trackway.trainer.tracking.sinks import QueuedSink, Sink
from trackway.trainer.tracking.tensorboard_run import TensorboardRun
from trackway.trainer.tracking.wandb_run import WandbRun
from trackway.wire.trainer import MetricsRow


@dataclass
class Tracking:
    """The run in MLflow, None when that is off, the queues of what goes there and to Weave, and the other backends."""

    run: MlflowRun | None
    mlflow: Background
    weave: Background
    others: Sequence[QueuedSink] = ()

    @property
    def backends(self) -> list[Sink]:
        """Where metrics go beyond this process and the run's folder."""
        first: list[Sink] = [] if self.run is None else [MlflowSink(self.run, self.mlflow)]
        return [*first, *self.others]

    def catch_up(self, rows: Sequence[MetricsRow]) -> None:
        """Send the rows of a resumed run again, as a killed process may have left some unsent.

        To MLflow only the newest: it would keep twice what it has, while the others take what they lack.
        """
        for row in rows:
            for sink in self.others:
                sink.log(row)
        if rows and self.run is not None:
            MlflowSink(self.run, self.mlflow).log(rows[-1])

    def close(self, status: str, deadline_s: float) -> None:
        """Send what is queued and end each backend's run with a status, within the deadline."""
        if self.run is not None:
            run = self.run
            self.mlflow.submit(lambda: run.finish(status))
        endings: list[Callable[[], None]] = [
            *(lambda queue=queue: queue.close(deadline_s) for queue in (self.mlflow, self.weave)),
            *(lambda sink=sink: sink.close(status, deadline_s) for sink in self.others),
        ]
        # Side by side: a backend that is away must not take the others' time.
        threads = [threading.Thread(target=ending) for ending in endings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def open_tracking(folder: RunFolder, config: RunConfig, default_uri: str | None) -> Tracking:
    """The run's tracking, whose MLflow ids stand in the run's folder from now on. Blocking."""
    trainer, jobs = config.trainer, Background("mlflow")
    uri = config.trackway.mlflow_uri or default_uri
    run = open_mlflow(uri, trainer.project_name, trainer.experiment_name, folder.info().run_id)
    if run is not None:
        folder.update(mlflow_uri=run.uri, experiment_id=run.experiment_id, run_id=run.run_id)
        if run.is_new:
            jobs.submit(lambda: run.log_params(leaves(config.model_dump(mode="json"))))
    others: list[QueuedSink] = []
    if "wandb" in trainer.logger:
        others.append(QueuedSink("wandb", WandbRun(folder, config)))
    if "tensorboard" in trainer.logger:
        others.append(QueuedSink("tensorboard", TensorboardRun(folder.path)))
    return Tracking(run, jobs, Background("weave"), others)
