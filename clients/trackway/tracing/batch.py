"""Spans as they leave this process: encoded once per destination, addressed by headers, ready to send or to store."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan

from trackway.tracing import attributes as names
from trackway.tracing.settings import TracingSettings
from trackway.wire.tracing import TraceBackend, TraceTarget

DEFAULT_EXPERIMENT = "0"
"""MLflow's own default experiment; its endpoint refuses a request that names none."""

_SPAN_OVERHEAD = 100
_VALUE_OVERHEAD = 8


@dataclass(frozen=True)
class Batch:
    """One export request: what it carries and where it goes; credentials are added when it is sent."""

    headers: Mapping[str, str]
    payload: bytes
    """OTLP protobuf, gzip."""
    spans: int

    def to_bytes(self) -> bytes:
        """One line of JSON with the headers, then the payload."""
        return json.dumps(dict(self.headers)).encode() + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, data: bytes, spans: int) -> "Batch":
        """The batch that `to_bytes` wrote. Raises ValueError for anything else."""
        head, found, payload = data.partition(b"\n")
        headers = json.loads(head)
        if not found or not isinstance(headers, dict):
            raise ValueError("expected a line of JSON headers and a payload")
        return cls(headers, payload, spans)


def encoded(spans: Sequence[ReadableSpan]) -> bytes:
    """OTLP protobuf of the spans, gzip; the fast level, as most of it is read on the same machine."""
    return gzip.compress(encode_spans(spans).SerializeToString(), compresslevel=1)


def routing(backend: TraceBackend, target: TraceTarget, settings: TracingSettings) -> dict[str, str]:
    """The headers by which a backend, or a collector in front of several, knows where a trace belongs."""
    experiment = target.mlflow_experiment_id or settings.experiment_id
    project = target.weave_project or settings.weave_project
    mlflow = {names.MLFLOW_EXPERIMENT_HEADER: experiment, names.MLFLOW_RUN_HEADER: target.mlflow_run_id}
    weave = {names.WEAVE_PROJECT_HEADER: project}
    wanted: dict[TraceBackend, dict[str, str | None]] = {
        TraceBackend.MLFLOW: mlflow | {names.MLFLOW_EXPERIMENT_HEADER: experiment or DEFAULT_EXPERIMENT},
        TraceBackend.WEAVE: weave,
        TraceBackend.OTLP: mlflow | weave,
    }
    return {name: value for name, value in wanted[backend].items() if value is not None}


def weight(span: ReadableSpan) -> int:
    """About the bytes of the span in OTLP before compression, without the cost of encoding it."""
    attributes = sum(map(_pair_weight, (span.attributes or {}).items()))
    events = sum(
        40 + len(event.name) + sum(map(_pair_weight, (event.attributes or {}).items())) for event in span.events
    )
    return _SPAN_OVERHEAD + len(span.name) + attributes + events + 40 * len(span.links)


def _pair_weight(pair: tuple[str, object]) -> int:
    key, value = pair
    if isinstance(value, str):
        size = len(value) if value.isascii() else len(value.encode())
    else:
        size = sum(_pair_weight(("", item)) for item in value) if isinstance(value, list | tuple) else 8
    return len(key) + size + _VALUE_OVERHEAD
