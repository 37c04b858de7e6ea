"""What takes the rows of a run, and the queue between the run and a backend."""

from typing import Protocol

from trackway.trainer.background import Background
from trackway.trainer.run_folder import RunFolder
from trackway.wire.trainer import MetricsRow


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
        print(" - ".join([f"step:{row.step}", *values]), flush=True)


class FileSink:
    """metrics.jsonl in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def log(self, row: MetricsRow) -> None:
        """Append the row."""
        self._folder.append_row(row)


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
        self._background = Background(name)
        self._background.submit(run.open)

    def log(self, row: MetricsRow) -> None:
        """Queue the row."""
        self._background.submit(lambda: self._run.log(row))

    def close(self, status: str, deadline_s: float) -> None:
        """Send what is queued and end the run with a status, within the deadline."""
        self._background.submit(lambda: self._run.finish(status))
        self._background.close(deadline_s)
