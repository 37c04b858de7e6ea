"""OTLP over HTTP: batches of spans, encoded and addressed by headers, and the endpoints that they are sent to."""

import asyncio
import gzip
import json
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.util.types import Attributes

from trackway.system.process import Experimental, warn_experimental
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


T = TypeVar("T")

LONGEST_RETRY_AFTER_S = 60.0
MOST_BYTES = 65_536
"""Most bytes that are read of an answer."""


class SendOutcome(Enum):
    """The outcome of sending a batch."""

    TAKEN = auto()
    LATER = auto()
    """The backend is down, slow, busy or failing: send the batch again."""
    DOUBTFUL = auto()
    """A refusal that may be temporary: MLflow answers 422 to any error of its store."""
    REFUSED = auto()
    """The backend rejects the batch permanently."""


@dataclass(frozen=True)
class Answer:
    """A backend's answer to one batch."""

    verdict: SendOutcome
    refused_spans: int = 0
    """Spans refused from a batch that was accepted."""
    reason: str = ""
    retry_after_s: float = 0.0
    answered: bool = True
    """True if the backend answered at all."""


class Endpoint:
    """Sends batches one at a time, from one thread.

    `timeout_s` bounds each exchange as a whole. httpx's own timeouts would bound each read alone, however many a slow
    answer takes.
    """

    def __init__(
        self,
        url: Callable[[], str],
        headers: Mapping[str, str],
        timeout_s: float,
        *,
        verify: bool | ssl.SSLContext = True,
        trust_env: bool = True,
    ) -> None:
        self._url = url
        self._headers = {
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
            "accept-encoding": "identity",
            **headers,
        }
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(timeout=timeout_s, verify=verify, trust_env=trust_env)
        self._runner = asyncio.Runner()

    def post(self, batch: Batch) -> Answer:
        """Send one batch. Never raises."""
        try:
            return answer_of(self._in_time(self._exchange(self._url(), batch)), batch.spans)
        except (httpx.LocalProtocolError, UnicodeEncodeError) as error:
            # Headers that HTTP cannot carry.
            return Answer(SendOutcome.REFUSED, reason=f"{type(error).__name__}: {error}")
        except Exception as error:
            # Any error, including a bad URL or a server that does not start, must not end the sending thread.
            return Answer(SendOutcome.LATER, reason=f"{type(error).__name__}: {error}", answered=False)

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._http.aclose())
        self._runner.close()

    def _in_time(self, exchange: Coroutine[Any, Any, T]) -> T:
        """The result of an exchange. Raises TimeoutError when it takes longer than `timeout_s`."""

        async def bounded() -> T:
            async with asyncio.timeout(self._timeout_s):
                return await exchange

        try:
            return self._runner.run(bounded())
        except TimeoutError:
            raise TimeoutError(f"expected the whole answer within {self._timeout_s:g} s, got a part") from None

    async def _exchange(self, url: str, batch: Batch) -> httpx.Response:
        """The answer with the beginning of its body, not decompressed: it may be endless, or a gzip bomb."""
        headers, body = {**self._headers, **batch.headers}, bytearray()
        async with self._http.stream("POST", url, content=batch.payload, headers=headers) as response:
            async for part in response.aiter_raw(MOST_BYTES):
                body += part
                if len(body) >= MOST_BYTES:
                    break
        retry_after = {name: value for name, value in response.headers.items() if name == "retry-after"}
        return httpx.Response(response.status_code, headers=retry_after, content=bytes(body[:MOST_BYTES]))


def endpoint(backend: TraceBackend, settings: TracingSettings) -> Endpoint:
    """The endpoint of Weave or an OTLP receiver, which must be fully configured (see `settings.missing`)."""
    timeout_s = settings.export_timeout_s
    if backend is TraceBackend.WEAVE:
        key = settings.weave_api_key.get_secret_value() if settings.weave_api_key else ""
        if settings.weave_is_hosted:
            warn_experimental(Experimental.WANDB)
        view = "/agents" if settings.weave_view == "agents" else ""
        url = f"{settings.weave_url.rstrip('/')}{view}/otel/v1/traces"
        return Endpoint(lambda: url, {names.WEAVE_KEY_HEADER: key}, timeout_s)
    receiver = settings.otlp_endpoint or ""
    return Endpoint(lambda: receiver, settings.otlp_headers, timeout_s)


def answer_of(response: httpx.Response, spans: int) -> Answer:
    """The outcome for a batch of `spans` spans, from the backend's HTTP answer."""
    if response.is_success:
        return _taken(response.content, spans)
    reason = f"HTTP {response.status_code}: {response.text[:200]}"
    if response.status_code in (408, 429) or response.status_code >= 500:
        return Answer(SendOutcome.LATER, reason=reason, retry_after_s=_retry_after(response))
    return Answer(SendOutcome.DOUBTFUL if response.status_code == 422 else SendOutcome.REFUSED, reason=reason)


def _taken(body: bytes, spans: int) -> Answer:
    """A 200 may still refuse some of the spans (OTLP's partial success)."""
    reply = ExportTraceServiceResponse()
    try:
        reply.ParseFromString(body)
    except DecodeError:
        return Answer(SendOutcome.TAKEN)  # some receivers answer in JSON or plain text
    refused = min(spans, reply.partial_success.rejected_spans)
    return Answer(SendOutcome.TAKEN, refused, reply.partial_success.error_message)


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value), LONGEST_RETRY_AFTER_S) if value.isdecimal() else 0.0
