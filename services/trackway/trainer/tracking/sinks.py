"""Sinks for the metrics rows of a run, and the queue between the run and a backend."""

import contextlib
from typing import Protocol

from trackway.trainer.delivery.jobs import DeliveryThread
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.job_queue import JobQueue
from trackway.wire.trainer import BackendSummary, MetricsRow


class Sink(Protocol):
    """A destination for the metrics of each step."""

    def log(self, row: MetricsRow) -> None:
        """Record one row; must not raise for failures outside this process."""
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


class MlflowSink:
    """Signals new rows to the MLflow delivery, which reads them from metrics.jsonl. Must follow FileSink."""

    def __init__(self, delivery: DeliveryThread) -> None:
        self._delivery = delivery

    def log(self, row: MetricsRow) -> None:
        """Wake the delivery."""
        self._delivery.wake()


class MetricsRun(Protocol):
    """A run in a metrics backend. The methods block and may raise; a single thread calls them, in this order."""

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
