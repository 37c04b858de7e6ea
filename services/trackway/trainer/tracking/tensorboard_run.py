"""The run as TensorBoard event files, in the run's folder or in TENSORBOARD_DIR."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trackway.wire.trainer import MetricsRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIR = "TENSORBOARD_DIR"


class TensorboardRun:
    """Each process of a run adds an event file; its first row supersedes earlier files from that step on."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.environ.get(DIR) or folder / "tensorboard")
        self._writer: SummaryWriter | None = None

    def open(self) -> None:
        """Do nothing: the file is created with its first row."""

    def log(self, row: MetricsRow) -> None:
        """Write the row and flush it, so that a killed process loses none."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=row.step)
        for name, value in row.data.items():
            self._writer.add_scalar(name, value, row.step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
