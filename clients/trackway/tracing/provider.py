"""The OpenTelemetry set-up of one service: sampler, ids, queue, exporter, counts.

A root is kept only when it is a trajectory; everything else follows its parent, so health checks and direct REST calls
leave no junk traces. Export runs in a background thread behind a bounded queue; what is lost is counted, and nothing
waits for it.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, Tracer, TraceState
from opentelemetry.util.types import Attributes
from pydantic import BaseModel, Field

from trackway.tracing import attributes as names
from trackway.tracing.context import activated, install
from trackway.tracing.export import ExperimentExporter


class TracingSettings(BaseModel):
    """Where spans go and how much text they carry."""

    endpoint: str | None = None
    """Full OTLP/HTTP URL, e.g. http://localhost:5000/v1/traces; None exports nothing."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every export, e.g. an API key."""
    experiment_id: str | None = None
    """MLflow experiment of spans whose trajectory names none."""
    token2text: bool = True
    """Decode tokens into text on recorded spans; False leaves counts only."""
    max_text_bytes: int = Field(default=16384, ge=256)
    """Longer texts are cut, with a visible marker."""
    max_queue_size: int = Field(default=16384, ge=1)
    """Spans waiting for export; beyond it spans are dropped and counted."""
    schedule_delay_s: float = Field(default=1.0, gt=0)
    """Longest time that a span waits for its batch."""


@dataclass(frozen=True)
class SpanStats:
    """Recorded spans that ended, that a backend took, and that an export lost; the rest waits or was dropped."""

    ended: int
    exported: int
    failed: int


class RandomIds(IdGenerator):
    """Ids from the operating system: `random.seed` in a trainer must not repeat span ids across workers."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16)) or 1

    def is_trace_id_random(self) -> bool:
        return True


class TrajectoryRoots(Sampler):
    """Keeps a root that carries a trajectory id; drops any other root."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        keep = names.TRAJECTORY_ID in (attributes or {})
        return SamplingResult(Decision.RECORD_AND_SAMPLE if keep else Decision.DROP, attributes if keep else None)

    def get_description(self) -> str:
        return "TrajectoryRoots"


class _Stamp(SpanProcessor):
    """Says on each span which service and process made it, and which experiment it belongs to; counts ends."""

    def __init__(self, service: str, experiment_id: str | None) -> None:
        self._service = service
        self._experiment_id = experiment_id
        self.ended = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        span.set_attribute(names.SERVICE, self._service)
        span.set_attribute(names.PROCESS, os.getpid())
        experiment = baggage.get_baggage(names.EXPERIMENT_ID, parent_context) or self._experiment_id
        if experiment is not None:
            span.set_attribute(names.EXPERIMENT_ID, str(experiment))

    def on_end(self, span: ReadableSpan) -> None:
        self.ended += 1


class _Counting(SpanExporter):
    """Counts what the wrapped exporter took and lost."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Tracing:
    """The tracing of one service in one process."""

    def __init__(self, service: str, settings: TracingSettings, exporter: SpanExporter | None = None) -> None:
        self.settings = settings
        self._stamp = _Stamp(service, settings.experiment_id)
        self._provider = TracerProvider(
            sampler=ParentBased(root=TrajectoryRoots()),
            id_generator=RandomIds(),
            # The resource becomes MLflow tags and the last service to report wins: say only what all share.
            resource=Resource({"service.name": "trackway"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._stamp)
        if exporter is None and settings.endpoint is not None:
            exporter = ExperimentExporter(settings.endpoint, settings.headers)
        self._counting = None if exporter is None else _Counting(exporter)
        if self._counting is not None:
            self._provider.add_span_processor(self._batches(self._counting))
        self.tracer: Tracer = self._provider.get_tracer("trackway")

    def _batches(self, exporter: SpanExporter) -> BatchSpanProcessor:
        queue = self.settings.max_queue_size
        delay_ms = self.settings.schedule_delay_s * 1000
        return BatchSpanProcessor(exporter, queue, delay_ms, max_export_batch_size=min(512, queue))

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Trace with this inside the block."""
        with activated(self):
            yield

    def install(self) -> None:
        """Trace with this wherever the process activates nothing else."""
        install(self)

    def stats(self) -> SpanStats:
        """Counts since the start."""
        counting = self._counting
        if counting is None:
            return SpanStats(self._stamp.ended, 0, 0)
        return SpanStats(self._stamp.ended, counting.exported, counting.failed)

    def flush(self, deadline_s: float) -> bool:
        """Export what waits; False when that took longer than `deadline_s` seconds (the SDK ignores its timeout)."""
        return _within(deadline_s, self._provider.force_flush)

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Export what waits and stop; False when that took longer than `deadline_s` seconds."""
        return _within(deadline_s, self._provider.shutdown)


def _within(deadline_s: float, work: object) -> bool:
    assert callable(work)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return not thread.is_alive()
