"""Sinks for the metrics rows of a run, and the queue between the run and a backend."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import BackendSummary, MetricsRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("trackway.trainer")


class JobQueue:
    """Runs jobs in order in its own thread, from a bounded queue. Failures are counted."""

    def __init__(self, name: str, capacity: int = 8192) -> None:
        self.name = name
        self.failed = 0
        """Jobs that raised."""
        self.dropped = 0
        """Jobs that did not fit in the queue, or were left at the deadline of `close`."""
        self.reason = ""
        """Error of the last failed job."""
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object]) -> None:
        """Queue a job, or count it as dropped when the queue is full."""
        try:
            self._jobs.put_nowait(run)
        except queue.Full:
            self.dropped += 1

    def close(self, deadline_s: float) -> None:
        """Run the queued jobs until the deadline, and log how many were lost."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=deadline_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self.dropped += self._jobs.qsize()
        if self.failed or self.dropped:
            logger.warning("%s: %d jobs failed, %d were dropped", self.name, self.failed, self.dropped)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                # Any error: the failure of a tracking backend must not stop training.
                self.failed += 1
                self.reason = f"{type(error).__name__}: {error}"
                if self.failed == 1:
                    logger.warning("%s: %s; later failures are only counted", self.name, self.reason)


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


class Sink(Protocol):
    """A destination for the metrics of each step."""

    def log(self, row: MetricsRow) -> None:
        """Record one row. Must not raise for failures outside this process."""
        ...


class ConsoleSink:
    """One line per step on standard output, in verl's form."""

    def log(self, row: MetricsRow) -> None:
        """Print the row."""
        values = [f"{name}:{value:.6g}" for name, value in sorted(row.data.items())]
        with contextlib.suppress(OSError):  # worker.log may be on a full disk
            print(" - ".join([f"step:{row.step}", *values]), flush=True)


class FileSink:
    """metrics.jsonl in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def log(self, row: MetricsRow) -> None:
        """Append the row."""
        self._folder.append_row(row)


class MetricsRun(Protocol):
    """A run in a metrics backend. The methods block and may raise. A single thread calls them, in this order."""

    def open(self) -> None: ...
    def log(self, row: MetricsRow) -> None: ...
    def finish(self, status: str) -> None:
        """End with FINISHED, FAILED, or KILLED for a run that was stopped."""
        ...


class QueuedSink:
    """A backend's run in its own thread."""

    def __init__(self, name: str, run: MetricsRun) -> None:
        self._run = run
        self._jobs = JobQueue(name)
        self._jobs.submit(run.open)
        self._queued = 0
        self._recorded = 0

    def log(self, row: MetricsRow) -> None:
        """Queue the row."""
        self._queued += len(row.data)
        self._jobs.submit(lambda: self._log(row))

    def close(self, status: str, deadline_s: float) -> None:
        """Send the queued rows and end the run with a status, within the deadline."""
        self._jobs.submit(lambda: self._run.finish(status))
        self._jobs.close(deadline_s)

    def summary(self) -> BackendSummary:
        """The number of lost values; before `close` it includes queued ones."""
        lost = self._queued - self._recorded
        return BackendSummary(backend=self._jobs.name, metrics_lost=lost, lost_because=self._jobs.reason)

    def _log(self, row: MetricsRow) -> None:
        self._run.log(row)
        self._recorded += len(row.data)
