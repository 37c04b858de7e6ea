"""The run in W&B, or in offline files for `wandb sync`."""

import logging
import os
from typing import TYPE_CHECKING

from trackway.system.experimental import Experimental, warn_experimental
from trackway.trainer.config import RunConfig
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import MetricsRow

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger("trackway.trainer")

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
