"""An OTLP receiver whose mood can be set: it answers, refuses, breaks, or keeps its callers waiting."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.serving import answered_by


@dataclass
class Arrived:
    """One request that the sink took."""

    path: str
    headers: dict[str, str]
    spans: list[str]
    ids: list[bytes]
    """Of the spans: a request that was given up and sent again brings the same ones."""


@dataclass
class Sink:
    """What arrived, and how the next requests are answered."""

    url: str = ""
    status: int = 200
    refuse_spans: int = 0
    """Of each request, by OTLP's partial success."""
    poison: str = ""
    """A request with a span of this name is always answered 500."""
    arrived: list[Arrived] = field(default_factory=list)
    asked: int = 0
    """Requests, those included that were not taken."""
    open: threading.Event = field(default_factory=threading.Event)
    """Requests wait until it is set."""

    @property
    def spans(self) -> list[str]:
        """Names of the spans that arrived, in order."""
        return [name for request in self.arrived for name in request.spans]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is what some tests are about."""


def _handler(sink: Sink) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            sink.asked += 1
            sink.open.wait(60)
            reply = ExportTraceServiceResponse()
            got = _parsed(self.path, dict(self.headers.items()), body)
            status = 500 if sink.poison in got.spans else sink.status
            if status == 200:
                sink.arrived.append(got)
                reply.partial_success.rejected_spans = sink.refuse_spans
            answer = reply.SerializeToString()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler


def _parsed(path: str, headers: dict[str, str], body: bytes) -> Arrived:
    request = ExportTraceServiceRequest()
    request.ParseFromString(gzip.decompress(body))
    spans = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
    return Arrived(
        path,
        {name.lower(): value for name, value in headers.items()},
        [span.name for span in spans],
        [span.span_id for span in spans],
    )


@contextmanager
def running_sink(port: int = 0, sink: Sink | None = None) -> Iterator[Sink]:
    """A sink on a free port, or the same one again on the port it had."""
    sink = sink or Sink()
    sink.open.set()
    with answered_by(_Server(("127.0.0.1", port), _handler(sink))) as sink.url:
        try:
            yield sink
        finally:
            sink.open.set()
