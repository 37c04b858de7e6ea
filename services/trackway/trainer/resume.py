"""Where a run begins: at the model, at its own newest checkpoint, or at one that is named."""

import logging
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from trackway.trainer.checkpoint import find_latest, load_checkpoint, named_checkpoint
from trackway.trainer.config import RunConfig
from trackway.trainer.learner import Learner
from trackway.trainer.plan import Progress
from trackway.trainer.run_folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

logger = logging.getLogger("trackway.trainer")


class Beginning(NamedTuple):
    """What a run's process goes on from."""

    progress: Progress
    saved_step: int | None
    """Step of the run's own checkpoint; None when there is none yet."""


def begin(folder: RunFolder, config: RunConfig, learner: Learner) -> Beginning:
    """Load the checkpoint that the run goes on from into the learner, and remove the rows after it.

    A run's own checkpoint goes before the one that it began at, else a crash would undo what it has trained since.
    Raises TrackwayError(INVALID_REQUEST) for a checkpoint that is named but not there, or of another model.
    """
    mode = config.trainer.resume_mode
    own = None if mode == "disable" else find_latest(folder.checkpoints)
    checkpoint = named_checkpoint(config) if own is None else own
    if checkpoint is None:
        folder.rewind(None)
        return Beginning(Progress(), None)
    progress = _loaded(checkpoint, learner)
    logger.info("begins at %s, after step %d", checkpoint, progress.step)
    if own is None:
        folder.rewind(None)
        return Beginning(progress.model_copy(update={"metrics": {}}), None)
    folder.rewind(MetricsRow(step=progress.step, data=progress.metrics))
    return Beginning(progress, progress.step)


def _loaded(checkpoint: Path, learner: Learner) -> Progress:
    try:
        return Progress.model_validate(load_checkpoint(checkpoint, learner))
    except (OSError, ValueError, SafetensorError) as error:  # incomplete, or another model's
        message = f"the checkpoint {checkpoint} cannot be loaded: {error}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
