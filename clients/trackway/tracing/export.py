"""OTLP export that sends each span to the MLflow experiment its trajectory names.

MLflow takes the experiment from a header of the request, and services outlive runs: so one OTLP exporter per
experiment, chosen by the span's own attribute. Other OTLP receivers ignore the header.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from trackway.tracing import attributes as names


class ExperimentExporter(SpanExporter):
    """One OTLP/HTTP exporter per MLflow experiment, made when the first span of an experiment comes."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout_s: float = 10.0) -> None:
        self._endpoint = endpoint
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._exporters: dict[str, OTLPSpanExporter] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send each experiment's spans in one request; FAILURE if any of them fails."""
        batches: dict[str, list[ReadableSpan]] = defaultdict(list)
        for span in spans:
            batches[str((span.attributes or {}).get(names.EXPERIMENT_ID, ""))].append(span)
        results = [self._exporter(experiment).export(batch) for experiment, batch in batches.items()]
        failed = any(result is not SpanExportResult.SUCCESS for result in results)
        return SpanExportResult.FAILURE if failed else SpanExportResult.SUCCESS

    def _exporter(self, experiment: str) -> OTLPSpanExporter:
        if experiment not in self._exporters:
            headers = {**self._headers, names.MLFLOW_EXPERIMENT_HEADER: experiment} if experiment else self._headers
            self._exporters[experiment] = OTLPSpanExporter(
                endpoint=self._endpoint,
                headers=headers,
                timeout=self._timeout_s,
                compression=Compression.Gzip,
            )
        return self._exporters[experiment]

    def shutdown(self) -> None:
        """Close every exporter."""
        for exporter in self._exporters.values():
            exporter.shutdown()
