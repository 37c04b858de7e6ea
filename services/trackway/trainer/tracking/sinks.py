"""What takes the rows of a run, and the queue between the run and a backend."""

import contextlib
from typing import Protocol

from trackway.trainer.delivery.jobs import DeliveryThread
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.tracking.job_queue import JobQueue
from trackway.wire.trainer import BackendSummary, MetricsRow


class Sink(Protocol):
    """Takes the metrics of each step."""

    def log(self, row: MetricsRow) -> None:
        """Record one row; must not raise for trouble outside this process."""
        ...


class ConsoleSink:
    """One line per step on standard output, in verl's form."""

    def log(self, row: MetricsRow) -> None:
        """Print the row."""
        values = [f"{name}:{value:.6g}" for name, value in sorted(row.data.items())]
        with contextlib.suppress(OSError):  # worker.log lies on a disk that may be full
            print(" - ".join([f"step:{row.step}", *values]), flush=True)


class FileSink:
    """metrics.jsonl in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def log(self, row: MetricsRow) -> None:
        """Append the row."""
        self._folder.append_row(row)


class MlflowSink:
    """Metrics of the MLflow run, which are read from metrics.jsonl: FileSink comes first."""

    def __init__(self, delivery: DeliveryThread) -> None:
        self._delivery = delivery

    def log(self, row: MetricsRow) -> None:
        """Say that there is a row to send."""
        self._delivery.wake()


class MetricsRun(Protocol):
    """A run in a backend of metrics. The methods block and may raise; one thread calls them, in this order."""

    def open(self) -> None: ...
    def log(self, row: MetricsRow) -> None: ...
    def finish(self, status: str) -> None:
        """End with FINISHED, FAILED, or KILLED for a run that was stopped."""
        ...


class QueuedSink:
    """A backend's run in a thread of its own."""

    def __init__(self, name: str, run: MetricsRun) -> None:
        self._run = run
        self._background = JobQueue(name)
        self._background.submit(run.open)
        self._given = 0
        self._taken = 0

    def log(self, row: MetricsRow) -> None:
        """Queue the row."""
        self._given += len(row.data)
        self._background.submit(lambda: self._log(row))

    def close(self, status: str, deadline_s: float) -> None:
        """Send what is queued and end the run with a status, within the deadline."""
        self._background.submit(lambda: self._run.finish(status))
        self._background.close(deadline_s)

    def summary(self) -> BackendSummary:
        """What was lost; before `close` also what still is in the queue."""
        lost = self._given - self._taken
        return BackendSummary(backend=self._background.name, metrics_lost=lost, lost_because=self._background.reason)

    def _log(self, row: MetricsRow) -> None:
        self._run.log(row)
        self._taken += len(row.data)
