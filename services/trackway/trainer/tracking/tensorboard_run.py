"""The run as TensorBoard's event files, in the run's folder or where TENSORBOARD_DIR says."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trackway.wire.trainer import MetricsRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIR = "TENSORBOARD_DIR"


class TensorboardRun:
    """Each process of a run adds a file; its first row supersedes what earlier ones say of that step and later ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.environ.get(DIR) or folder / "tensorboard")
        self._writer: SummaryWriter | None = None

    def open(self) -> None:
        """Nothing: the file begins with its first row."""

    def log(self, row: MetricsRow) -> None:
        """Write the row to the disk: a killed process leaves nothing in a buffer."""
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
