"""Waits at the end of a command until MLflow and Weave have what a run recorded: traces, feedback, metrics.

Everything that waits is on disk. The services send the spans, and the trainer service sends the rest of an ended run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trackway.clients import TrainerClient, run
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.last_spans import spans_waiting
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunInfo

STALLED_S = 60.0
"""Longest wait without progress."""
_POLL_S = 0.5


@dataclass(frozen=True)
class Unsent:
    """Counts of data that the backends have not received."""

    spans: int = 0
    """Spans of all runs of the services. Attached services are not counted, since others use them too."""
    feedback: int = 0
    """Values, and links of traces to the run."""
    rows: int = 0
    """Rows of metrics."""

    @property
    def total(self) -> int:
        """All of it; 0 when nothing is left."""
        return self.spans + self.feedback + self.rows

    def __str__(self) -> str:
        counts = ((self.spans, "span", ""), (self.feedback, "value", " of feedback"), (self.rows, "row", " of metrics"))
        parts = [f"{count:,} {noun}{'s' * (count != 1)}{of}" for count, noun, of in counts if count]
        return ", ".join(parts) or "nothing"


def wait_for_delivery(deployment: Deployment, info: RunInfo, show: Callable[[Unsent], None]) -> RunInfo:
    """Wait until nothing is left, or nothing was sent for STALLED_S; returns the run with its counts of then.

    Ctrl-C is raised again. A trainer that does not answer ends the wait.
    """
    client, is_counted = TrainerClient(deployment.url("trainer")), not deployment.attached
    fewest, since = -1, time.monotonic()
    while True:
        try:
            info = run(client.run(info.run))
        except TrackwayError:
            return info
        spans = spans_waiting(deployment) if is_counted and info.traces is not None else 0
        if is_counted and info.traces is not None:
            size = info.traces.spool_bytes if spans else 0
            counts = info.traces.model_copy(update={"spans_waiting": spans, "spool_bytes": size})
            info = info.model_copy(update={"traces": counts})
        unsent = replace(unsent_of(info), spans=spans)
        show(unsent)
        if fewest < 0 or unsent.total < fewest:
            fewest, since = unsent.total, time.monotonic()
        if not unsent.total or time.monotonic() - since > STALLED_S:
            return info
        time.sleep(_POLL_S)


def unsent_of(info: RunInfo) -> Unsent:
    """Return the counts that the run reports."""
    feedback = sum(summary.feedback_waiting for summary in info.tracking)
    rows = sum(summary.rows_waiting + summary.end_waiting for summary in info.tracking)
    return Unsent(info.traces.spans_waiting if info.traces else 0, feedback, rows)
