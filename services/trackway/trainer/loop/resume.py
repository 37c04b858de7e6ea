"""Start of a run: from the model, from its own newest checkpoint, or from a checkpoint that is named."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from trackway.learner.learner import Learner
from trackway.run_config import RunConfig
from trackway.trainer.loop.schedule import Progress, WeightVersions
from trackway.trainer.loop.scheduler import SchedulerState
from trackway.trainer.run_state.checkpoint import (
    DAMAGED,
    fetch_checkpoint,
    find_all,
    find_damage,
    finished_trajectories,
    load_checkpoint,
    named_checkpoint,
    not_loaded,
    set_aside_damaged,
)
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Trajectory

logger = logging.getLogger("trackway.trainer")


class Beginning(NamedTuple):
    """The state that a run's process continues from."""

    progress: Progress
    saved_step: int | None
    """Step of the run's own checkpoint, or None when there is none yet."""
    notice: str = ""
    """The damaged checkpoints that were skipped."""
    finished: Sequence[Trajectory] = ()
    """Trajectories of the run's own checkpoint that are not trained yet."""


def begin(folder: RunFolder, config: RunConfig, learner: Learner, skip_damaged: bool = False) -> Beginning:
    """Load the checkpoint that the run continues from into the learner, and remove the rows after it.

    A run's own checkpoint takes precedence over the one it started from, or a crash would undo its training since.
    With `skip_damaged` the newest intact checkpoint is loaded, and the damaged ones after it are kept under another
    name. Raises CHECKPOINT_CORRUPT for a damaged checkpoint, with the remedy, and INVALID_REQUEST for a named
    checkpoint that does not exist or belongs to another model.
    """
    mode = config.trainer.resume_mode
    own = [] if mode == "disable" else find_all(folder.checkpoints)
    if own:
        return _newest(folder, config, own, learner, skip_damaged)
    checkpoint = named_checkpoint(config)
    progress = Progress() if checkpoint is None else _named(checkpoint, learner, folder.path)
    folder.rewind(None)
    forgotten = {"metrics": {}, "unvalidated": {}, "scheduler": SchedulerState(), "versions": WeightVersions()}
    forgotten |= {"validation": None, "rows": []}
    return Beginning(progress.model_copy(update=forgotten), None)


def _named(checkpoint: Path | str, learner: Learner, folder: Path) -> Progress:
    """Load a named checkpoint. Never fall back to another, since the user chose this one.

    A copy at a URL is fetched into a temporary folder below `folder`, which the learner's ranks share.
    """
    try:
        if isinstance(checkpoint, Path):
            return _loaded(checkpoint, learner)
        with TemporaryDirectory(prefix=".fetched_", dir=folder) as scratch:
            return _loaded(fetch_checkpoint(checkpoint, Path(scratch)), learner)
    except TrackwayError as error:
        if error.code is not ErrorCode.CHECKPOINT_CORRUPT:
            raise
        parent = str(checkpoint).rpartition("/")[0]
        remedy = f"restore it from a copy, or start a run from another one of {parent}"
        raise TrackwayError(error.code, f"{error.message}; {remedy}", **error.detail) from error


def _newest(
    folder: RunFolder, config: RunConfig, checkpoints: Sequence[Path], learner: Learner, skip_damaged: bool
) -> Beginning:
    damaged: dict[Path, TrackwayError] = {}
    for checkpoint in checkpoints:
        try:
            progress = _loaded(checkpoint, learner)
        except TrackwayError as error:
            if error.code is not ErrorCode.CHECKPOINT_CORRUPT:
                raise
            damaged[checkpoint] = error
            if not skip_damaged:
                break
        else:
            notice = "; ".join(_set_aside(path, error, progress.step) for path, error in damaged.items())
            progress = _with_rows(folder, progress)
            return Beginning(progress, progress.step, notice, finished_trajectories(checkpoint))
    raise _no_intact_checkpoint(folder, config, checkpoints, damaged)


def _with_rows(folder: RunFolder, progress: Progress) -> Progress:
    """The progress with the rows that wait for a validation. The folder then has the other rows up to its step.

    A validation of the newest step is begun again with the weights that are published next.
    """
    newest = MetricsRow(step=progress.step, timestamp=time.time_ns() // 1_000_000, data=progress.metrics)
    folder.rewind(newest.model_copy(update={"data": {}}))
    rows = {row.step: row for row in ([newest] if newest.data else [])} | {row.step: row for row in progress.rows}
    written = {row.step for row in folder.rows()}
    missing = [row for step, row in sorted(rows.items()) if step not in written]
    validation = progress.validation if progress.validation and progress.validation.step not in written else None
    if validation is not None and validation.step < progress.step:
        return progress.model_copy(update={"rows": missing})
    changes: dict[str, object] = {"validation": None, "rows": []}
    if validation is not None and missing:
        changes["unvalidated"] = missing.pop().data
    for row in missing:
        folder.append_row(row)
    return progress.model_copy(update=changes)


def _set_aside(checkpoint: Path, error: TrackwayError, step: int) -> str:
    """Sets a damaged checkpoint aside and returns the notice. Called once another checkpoint is loaded."""
    kept = set_aside_damaged(checkpoint)
    notice = f"went back to step {step}: {error.message}; it is kept as {kept.name}"
    logger.warning("%s", notice)
    return notice


def _no_intact_checkpoint(
    folder: RunFolder, config: RunConfig, checkpoints: Sequence[Path], damaged: dict[Path, TrackwayError]
) -> TrackwayError:
    """The error for the newest damaged checkpoint, with the remedy."""
    newest, error = next(iter(damaged.items()))
    whole = next((path for path in checkpoints if path not in damaged and find_damage(path) is None), None)
    count = len(checkpoints)
    if whole is None:
        keep = config.trainer.max_actor_ckpt_to_keep
        kept = f" (trainer.max_actor_ckpt_to_keep={keep})" if keep is not None else ""
        remedy = (
            f"of the {count} checkpoints that are kept{kept} none is whole: restore one from a copy, or train from the "
            "beginning under another trainer.experiment_name"
        )
    else:
        remedy = (
            f"{whole.name} before it is whole: `trackway train --resume {folder.name} --skip-damaged` goes on from it "
            f"and keeps the damaged one as {DAMAGED}{newest.name}"
        )
    return TrackwayError(ErrorCode.CHECKPOINT_CORRUPT, f"{error.message}; {remedy}", **error.detail)


def _loaded(checkpoint: Path, learner: Learner) -> Progress:
    state = load_checkpoint(checkpoint, learner)
    try:
        progress = Progress.model_validate(state)
    except ValueError as error:  # another version's
        raise not_loaded(checkpoint, error) from error
    logger.info("begins at %s, after step %d", checkpoint, progress.step)
    return progress
