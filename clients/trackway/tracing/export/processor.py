"""The span processor: batches and encodes ended spans in a background thread with a bounded queue."""

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter

from trackway.tracing import attributes as names
from trackway.tracing.context import carried, current_target
from trackway.tracing.export.backend_queue import BackendQueue
from trackway.tracing.export.batch import Batch, encoded, routing, weight, with_few_roots
from trackway.tracing.export.translation import translated
from trackway.tracing.settings import TracingSettings
from trackway.tracing.trace_stats import current_trace_stats
from trackway.wire.tracing import TraceBackend, TraceTarget

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
