"""Waits at the end of a command until MLflow and Weave have what a run recorded: traces, feedback, metrics.

Everything that waits is on disk. The services send the spans, and the trainer service sends the rest of an ended run.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trackway.clients import TrainerClient, run
from trackway.deploy.deployment.record import Deployment
from trackway.trainer.traces.span_counts import SpanAccounts
from trackway.wire.errors import TrackwayError
from trackway.wire.health import SpanCounts
from trackway.wire.trainer import RunInfo

STALLED_S = 60.0
"""Longest wait without progress."""
_POLL_S = 0.5


@dataclass(frozen=True)
class Unsent:
    """What backends have not received."""

    spans: int = 0
    """Of all runs of the services; not counted for attached services, which others may use."""
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
    return run(_wait(deployment, info, show))


def unsent_of(info: RunInfo) -> Unsent:
    """What the run's own counts say."""
    feedback = sum(summary.feedback_waiting for summary in info.tracking)
    rows = sum(summary.rows_waiting + summary.end_waiting for summary in info.tracking)
    return Unsent(info.traces.spans_waiting if info.traces else 0, feedback, rows)


async def _wait(deployment: Deployment, info: RunInfo, show: Callable[[Unsent], None]) -> RunInfo:
    services: Sequence[str] = () if deployment.attached or info.traces is None else deployment.services
    accounts = SpanAccounts({name: deployment.url(name) for name in services}, SpanCounts)
    client = TrainerClient(deployment.url("trainer"))
    least, moved_at = -1, time.monotonic()
    while True:
        try:
            info = await client.run(info.run)
        except TrackwayError:
            return info
        if services and info.traces is not None:
            await accounts.open()
            counts = accounts.summary()
            current = {"spans_waiting": counts.spans_waiting, "spool_bytes": counts.spool_bytes}
            info = info.model_copy(update={"traces": info.traces.model_copy(update=current)})
        unsent = unsent_of(info)
        if not services:
            unsent = replace(unsent, spans=0)
        show(unsent)
        if least < 0 or unsent.total < least:
            least, moved_at = unsent.total, time.monotonic()
        if not unsent.total or time.monotonic() - moved_at > STALLED_S:
            return info
        await asyncio.sleep(_POLL_S)
