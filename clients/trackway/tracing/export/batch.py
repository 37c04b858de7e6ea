"""Batches of spans, encoded and addressed by headers, ready to be sent or stored."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.util.types import Attributes

from trackway.tracing import attributes as names
from trackway.tracing.settings import TracingSettings
from trackway.wire.trajectory import TraceBackend, TraceTarget

MAX_ROOTS = 100
"""Most root spans per request: with more, MLflow 3.17 links no trace to the run and still answers 200."""

_LEVEL = 6
"""Compression level of gzip: 4 % fewer bytes than level 1, for 10 us of CPU a trajectory."""

DEFAULT_EXPERIMENT = "0"
"""MLflow's default experiment. Its endpoint refuses a request without one."""

_SPAN, _LINK_OR_EVENT, _VALUE = 100, 40, 8
"""Approximate bytes of each in OTLP, without its texts."""


@dataclass(frozen=True)
class Batch:
    """One export request: payload and routing headers. Credentials are added on sending."""

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
        head, separator, payload = data.partition(b"\n")
        headers = json.loads(head)
        if not separator or not isinstance(headers, dict):
            raise ValueError("expected a line of JSON headers and a payload")
        return cls(headers, payload, spans)


def joined(first: Batch, second: Batch) -> Batch:
    """One request with the spans of both, whose headers must be equal. Concatenated protobuf messages are merged.

    Compressed again, because not every receiver reads a second gzip member.
    """
    whole = gzip.decompress(first.payload) + gzip.decompress(second.payload)
    return Batch(first.headers, gzip.compress(whole, _LEVEL), first.spans + second.spans)


def encoded(spans: Sequence[ReadableSpan]) -> bytes:
    """OTLP protobuf of the spans, as gzip."""
    return gzip.compress(encode_spans(spans).SerializeToString(), _LEVEL)


def routing(backend: TraceBackend, target: TraceTarget, settings: TracingSettings) -> dict[str, str]:
    """The headers that tell a backend, or a collector, the destination of a trace."""
    experiment = target.mlflow_experiment_id or settings.experiment_id
    project = target.weave_project or settings.weave_project
    mlflow = {names.MLFLOW_EXPERIMENT_HEADER: experiment, names.MLFLOW_RUN_HEADER: target.mlflow_run_id}
    weave = {names.WEAVE_PROJECT_HEADER: project}
    wanted: dict[TraceBackend, dict[str, str | None]] = {
        TraceBackend.MLFLOW: mlflow | {names.MLFLOW_EXPERIMENT_HEADER: experiment or DEFAULT_EXPERIMENT},
        TraceBackend.WEAVE: weave,
        TraceBackend.OTLP: mlflow | weave,
    }
    # An empty experiment is answered with 200 and drops the spans.
    return {name: value for name, value in wanted[backend].items() if value}


def with_few_roots(spans: Sequence[ReadableSpan]) -> list[list[ReadableSpan]]:
    """The spans, in order, split into as few requests as `MAX_ROOTS` allows."""
    parts: list[list[ReadableSpan]] = [[]]
    roots = 0
    for span in spans:
        if span.parent is None:
            roots += 1
            if roots > MAX_ROOTS:
                parts.append([])
                roots = 1
        parts[-1].append(span)
    return parts


def weight(span: ReadableSpan) -> int:
    """The approximate bytes of the span in uncompressed OTLP, without encoding it."""
    events = sum(_LINK_OR_EVENT + len(event.name) + _attributes_weight(event.attributes) for event in span.events)
    return _SPAN + len(span.name) + _attributes_weight(span.attributes) + events + _LINK_OR_EVENT * len(span.links)


def _attributes_weight(attributes: Attributes) -> int:
    total = 0
    for key, value in (attributes or {}).items():
        total += len(key) + _VALUE
        if type(value) is str:
            total += len(value) if value.isascii() else len(value.encode(errors="replace"))
        else:
            total += _VALUE
    return total
