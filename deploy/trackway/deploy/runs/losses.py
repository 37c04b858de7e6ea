"""Rollouts of a run that are open or failed, and spans, metrics and feedback that reached no backend."""

from dataclasses import dataclass
from pathlib import Path

from trackway.clients import CallPolicy, TrainerClient, run
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.terminal.progress import rollout_account
from trackway.tracing.settings import SPOOL_FOLDER
from trackway.trainer.undelivered import sentences
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import ENDED, RunInfo

_ASK = CallPolicy.question(30.0)


@dataclass(frozen=True)
class Unsent:
    """Counts of data that the backends have not received."""

    spans: int = 0
    """Spans of all runs of the services. Attached services are not counted, since others use them too."""
    feedback: int = 0
    """Values, and links of traces to the run."""
    rows: int = 0
    """Rows of metrics."""

    @classmethod
    def of(cls, info: RunInfo) -> "Unsent":
        """The counts that the run reports."""
        feedback = sum(summary.feedback_waiting for summary in info.tracking)
        rows = sum(summary.rows_waiting + summary.end_waiting for summary in info.tracking)
        return cls(info.traces.spans_waiting if info.traces else 0, feedback, rows)

    @property
    def total(self) -> int:
        """All of it. 0 when nothing is left."""
        return self.spans + self.feedback + self.rows

    def __str__(self) -> str:
        counts = ((self.spans, "span", ""), (self.feedback, "value", " of feedback"), (self.rows, "row", " of metrics"))
        parts = [f"{count:,} {noun}{'s' * (count != 1)}{of}" for count, noun, of in counts if count]
        return ", ".join(parts) or "nothing"


def active_runs(deployment: Deployment) -> tuple[list[RunInfo], list[str]]:
    """The active runs, and sentences about their rollouts and about any run's lost or waiting metrics and feedback.

    If the trainer does not answer, the only sentence is its error.
    """
    try:
        runs = run(TrainerClient(deployment.url("trainer"), policy=_ASK).runs())
    except TrackwayError as error:
        return [], [f"the status of the runs is unavailable: {error.message}"]
    active = [info for info in runs if info.state not in ENDED]
    notes = [
        f"run {info.run}: {sentence}"
        for info in runs
        for sentence in [*(rollout_account(info) if info in active else []), *tracking_losses(info)]
    ]
    return active, notes


def tracking_losses(info: RunInfo) -> list[str]:
    """Sentences about lost or waiting metrics and feedback of a run. Empty when all arrived."""
    return [sentence for summary in info.tracking for sentence in sentences(summary)]


def rollout_losses(info: RunInfo, outputs: Path | None) -> list[str]:
    """A sentence about the rollouts that failed. Empty when none did.

    `outputs` is None for services that run elsewhere.
    """
    failed = sum(info.rollout_states.get(state, 0) for state in ("dropped_failed", "dropped_infrastructure"))
    if not failed:
        return []
    where = f"; page Failures of `trackway console --outputs {outputs}` has their errors" if outputs else ""
    return [f"{failed} of {info.rollout_states['submitted']} failed and were not trained on{where}"]


def trace_losses(info: RunInfo, outputs: Path | None) -> list[str]:
    """Sentences about lost or waiting spans of a run. Empty when all arrived.

    `outputs` is None for services that run elsewhere.
    """
    traces = info.traces
    if traces is None:
        return []
    lines = []
    if traces.spans_lost:
        parts = {"dropped for lack of space": traces.spans_dropped, "refused by a backend": traces.spans_refused}
        reasons = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
        lines.append(f"{traces.spans_lost} spans lost: {reasons}; see the services' logs")
    if traces.spool_bytes:
        size = f"{traces.spool_bytes / 1e6:.1f} MB" if traces.spool_bytes >= 1e5 else f"{traces.spool_bytes} bytes"
        where = f"in {outputs / SPOOL_FOLDER}" if outputs else "where the services run"
        lines.append(f"{size} of traces wait on disk {where}; running services send them once the backend is back")
    elif traces.spans_waiting:
        lines.append(f"{traces.spans_waiting} spans were still being sent when the run ended")
    if traces.unknown:
        lines.append(f"span counts are unavailable for: {', '.join(traces.unknown)}")
    return lines
