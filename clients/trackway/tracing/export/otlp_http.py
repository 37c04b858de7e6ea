"""OTLP/HTTP endpoints: sending a batch, and interpreting the answer."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from trackway.system.process import Experimental, warn_experimental
from trackway.tracing import attributes as names
from trackway.tracing.export.batch import Batch
from trackway.tracing.settings import TracingSettings
from trackway.wire.trajectory import TraceBackend

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
