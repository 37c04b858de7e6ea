"""What of a run did not reach its backends: spans, metrics, feedback."""

from pathlib import Path

from trackway.clients import CallPolicy, TrainerClient, run
from trackway.deploy.deployment.record import Deployment
from trackway.tracing.settings import SPOOL_FOLDER
from trackway.trainer.tracking import sentences
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunInfo

_ASK = CallPolicy(read_s=30.0, total_s=30.0, attempts=1)


def run_notes(deployment: Deployment) -> list[str]:
    """Sentences about metrics and feedback that are lost or still waiting, by run.

    A trainer that does not answer gives one sentence that says so.
    """
    try:
        runs = run(TrainerClient(f"{deployment.base_url}/trainer", policy=_ASK).runs())
    except TrackwayError as error:
        return [f"the trainer did not say what waits of its runs: {error.message}"]
    return [f"run {info.run}: {sentence}" for info in runs for sentence in tracking_losses(info)]


def tracking_losses(info: RunInfo) -> list[str]:
    """Sentences about metrics or feedback of a run that are lost or still waiting; empty when all arrived."""
    return [sentence for summary in info.tracking for sentence in sentences(summary)]


def trace_losses(info: RunInfo, outputs: Path | None) -> list[str]:
    """Sentences about spans of a run that are lost or still waiting; empty when all arrived.

    `outputs` is None for services that run elsewhere.
    """
    traces = info.traces
    if traces is None:
        return []
    said = []
    if traces.spans_lost:
        parts = {"found no room": traces.spans_dropped, "were refused by a backend": traces.spans_refused}
        reasons = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
        said.append(f"{traces.spans_lost} spans lost: {reasons}; the services' logs say why")
    if traces.spool_bytes:
        size = f"{traces.spool_bytes / 1e6:.1f} MB" if traces.spool_bytes >= 1e5 else f"{traces.spool_bytes} bytes"
        where = f"in {outputs / SPOOL_FOLDER}" if outputs else "where the services run"
        said.append(f"{size} of traces wait on disk {where} and are sent when the backend is back and services run")
    elif traces.spans_waiting:
        said.append(f"{traces.spans_waiting} spans were still on their way when the run ended")
    if traces.unknown:
        said.append(f"span counts are unavailable for: {', '.join(traces.unknown)}")
    return said
