"""The OpenTelemetry setup of one service: sampler, ids, limits, backends, counts.

A root span is sampled only in a context from `kept_root`, as for trajectories. Other spans follow their parent, so
health checks and direct REST calls create no traces, and a caller's sampled trace is continued.
"""

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, Tracer, TraceState
from opentelemetry.util.types import Attributes

from trackway.tracing import attributes as names
from trackway.tracing.context import carried, current_target, current_trace_stats, is_kept_root
from trackway.tracing.export.backends import MlflowEndpoint
from trackway.tracing.export.otlp import Batch, encoded, endpoint, routing, weight, with_few_roots
from trackway.tracing.export.queues import BackendQueue, BackendStats, DiskQueue
from trackway.tracing.export.translation import translated
from trackway.tracing.settings import Redact, TracingSettings, load_redaction
from trackway.wire.trajectory import TraceBackend, TraceTarget

logger = logging.getLogger("trackway.tracing")

BATCH_SPANS = 512


class ExportSpanProcessor(SpanProcessor):
    """Takes ended spans, translates and encodes them for their backends, and hands each its batch.

    `exporter` receives every span too, untranslated and whatever its target; for tests and custom backends.
    """

    def __init__(
        self,
        service: str,
        settings: TracingSettings,
        backend_queues: Mapping[TraceBackend, BackendQueue],
        exporter: SpanExporter | None,
    ) -> None:
        self._stamp: dict[str, str | int] = {names.SERVICE: service, names.PROCESS: os.getpid()}
        self._settings = settings
        self._backend_queues = backend_queues
        self._exporter = exporter
        self._queue: deque[tuple[ReadableSpan, TraceTarget]] = deque()
        self._changed = threading.Condition()
        self._encoding = 0
        self._hurry = False
        self._stop = False
        self.ended = 0
        """Recorded spans that ended."""
        self.dropped = 0
        """Ended spans lost because the queue was full, or because this process has no such backend."""
        self._thread: threading.Thread | None = None

    @property
    def queued(self) -> int:
        """Ended spans that are in no backend's queue yet."""
        with self._changed:
            return len(self._queue) + self._encoding

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Set the attributes of every span: service, process, trajectory and agent."""
        span.set_attributes({**self._stamp, **carried(parent_context)})

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span and add its size to the current trace stats."""
        stats = current_trace_stats()
        if stats is not None:
            stats.bytes += weight(span)
        with self._changed:
            self.ended += 1
            if self._stop or len(self._queue) >= self._settings.max_queue_size:
                self.dropped += 1
                return
            self._queue.append((span, current_target()))
            self._ensure_thread()
            if len(self._queue) == BATCH_SPANS:
                self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait until every queued span is encoded and in the backends' queues; False on timeout."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._queue and not self._encoding, timeout_millis / 1000)

    def shutdown(self) -> None:
        """Reject further spans. The thread exits when the queue is empty."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def _ensure_thread(self) -> None:
        if self._thread is None:  # started with the first span, because most test processes have none
            self._thread = threading.Thread(target=self._work, name="trackway-traces", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due, self._settings.schedule_delay_s)
                taken = [self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))]
                self._encoding = len(taken)
                if not taken:
                    self._hurry = False
                    if self._stop:
                        return
            self._hand_over(taken)
            with self._changed:
                self._encoding = 0
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._stop or len(self._queue) >= BATCH_SPANS or (self._hurry and bool(self._queue))

    def _hand_over(self, taken: list[tuple[ReadableSpan, TraceTarget]]) -> None:
        groups: dict[TraceTarget, list[ReadableSpan]] = defaultdict(list)
        for span, target in taken:
            groups[target].append(span)
        for target, group in groups.items():
            for spans in with_few_roots(group):
                try:
                    self._send(spans, target)
                except Exception:
                    # Any error must leave the thread running and the loss counted.
                    logger.exception("%d spans could not be encoded", len(spans))
                    self._lose(len(spans))
        if self._exporter is not None and taken:
            try:
                self._exporter.export([span for span, _ in taken])
            except Exception:
                logger.exception("the exporter raised; it did not export %d spans", len(taken))

    def _send(self, spans: list[ReadableSpan], target: TraceTarget) -> None:
        backends = self._settings.sent_to(target.backends or self._settings.default_backends)
        payloads: dict[tuple[TraceBackend, ...], bytes] = {}
        for backend in backends:
            backend_queue = self._backend_queues.get(backend)
            if backend_queue is None:
                self._lose(len(spans), f"{self._settings.missing(backend)}; spans for it are dropped and counted")
                continue
            readers = self._settings.readers(backend)
            if readers not in payloads:
                payloads[readers] = encoded([translated(span, readers) for span in spans])
            backend_queue.put(Batch(routing(backend, target, self._settings), payloads[readers], len(spans)))

    def _lose(self, spans: int, reason: str = "") -> None:
        with self._changed:
            if reason and not self.dropped:
                logger.warning("%s", reason)
            self.dropped += spans


def monotonic_deadline(seconds: float) -> float:
    """The time `seconds` from now on `time.monotonic`."""
    return time.monotonic() + seconds


MAX_LINKS = 8192
"""Most trajectories that a step's span links to. OpenTelemetry's default is 128."""
MAX_EVENTS = 1024


@dataclass(frozen=True)
class SpanStats:
    """Counts of recorded spans since the process started."""

    ended: int = 0
    dropped: int = 0
    """Lost before reaching a backend's queue: the span queue was full, or the backend is not configured here."""
    queued: int = 0
    """Not encoded yet, and so in no backend's queue."""
    backends: dict[str, BackendStats] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Spans that some backend will never receive."""
        return self.dropped + sum(backend.dropped + backend.refused for backend in self.backends.values())


class RandomIds(IdGenerator):
    """Ids from the operating system, because `random.seed` in a trainer would repeat span ids across workers."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16)) or 1

    def is_trace_id_random(self) -> bool:
        return True


class KeptRoots(Sampler):
    """Samples root spans whose context is from `kept_root`, and drops other roots."""

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
        keep = is_kept_root(parent_context)
        return SamplingResult(Decision.RECORD_AND_SAMPLE if keep else Decision.DROP, attributes if keep else None)

    def get_description(self) -> str:
        return "KeptRoots"


class Tracing:
    """The tracing of one service in one process.

    `exporter` receives every span in addition to the configured backends. `redact` replaces the function named in the
    settings. `root_operations` also traces functions that run outside any trajectory, as verl does.

    Raises:
        ValueError: `settings.redact` does not name a function.
    """

    def __init__(
        self,
        service: str,
        settings: TracingSettings,
        exporter: SpanExporter | None = None,
        redact: Redact | None = None,
        root_operations: bool = False,
    ) -> None:
        self.settings = settings
        self.redact: Redact | None = redact or load_redaction(settings.redact)
        self.root_operations = root_operations
        self._backend_queues = {
            backend: _backend_queue(backend, service, settings) for backend in settings.sent_to(settings.usable)
        }
        self._processor = ExportSpanProcessor(service, settings, self._backend_queues, exporter)
        self._provider = TracerProvider(
            sampler=ParentBased(root=KeptRoots()),
            id_generator=RandomIds(),
            # The resource becomes MLflow tags, which each service overwrites, so it has only what all services share.
            resource=Resource({"service.name": "trackway"}),
            span_limits=SpanLimits(max_links=MAX_LINKS, max_events=MAX_EVENTS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self.tracer: Tracer = self._provider.get_tracer("trackway")

    def stats(self) -> SpanStats:
        """Counts since the process started."""
        # Read first: a span on its way to a backend's queue is counted twice, never missed.
        queued = self._processor.queued
        backends = {backend.value: queue.stats() for backend, queue in self._backend_queues.items()}
        return SpanStats(self._processor.ended, self._processor.dropped, queued, backends)

    def flush(self, deadline_s: float) -> bool:
        """Wait until every span is exported. False when that took longer than `deadline_s` seconds."""
        deadline = monotonic_deadline(deadline_s)
        encoded = self._processor.force_flush(int(deadline_s * 1000))
        emptied = [queue.wait_empty(deadline) for queue in self._backend_queues.values()]
        return encoded and all(emptied)

    def shutdown(self, deadline_s: float = 5.0) -> bool:
        """Export waiting spans and stop. Spans left after `deadline_s` seconds stay on disk. False if there are any."""
        deadline = monotonic_deadline(deadline_s)
        encoded = self._processor.force_flush(int(deadline_s * 1000))
        self._provider.shutdown()
        # Sequentially, as each queue sends until it is closed; Python 3.12 starts no threads at interpreter shutdown.
        closed = [queue.close(deadline) for queue in self._backend_queues.values()]
        return encoded and all(closed)


def _backend_queue(backend: TraceBackend, service: str, settings: TracingSettings) -> BackendQueue:
    disk_queue = None
    if settings.spool_dir is not None:
        disk_queue = DiskQueue(Path(settings.spool_dir) / backend.value, service, settings.max_spool_bytes)
    by_name = settings.mlflow_uri and backend in settings.sent_to([TraceBackend.MLFLOW])
    return BackendQueue(backend.value, MlflowEndpoint(settings) if by_name else endpoint(backend, settings), disk_queue)
