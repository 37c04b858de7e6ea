"""The real Weave trace-server code on sqlite, behind HTTP: `python trace_server.py DATABASE PORT API_KEY`.

Runs in `.venv-weave`, as a process of its own: weave 0.52 (server) and 0.54 (client) cannot share an environment. Only
HTTP, keys and W&B's project lookup are ours; what OTLP spans become, and how calls are searched, is weave's.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (the development environment has weave's client only, and protobuf makes its classes at run time)

import base64
import gzip
import os
import sys
import threading
import typing
import zlib
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from pydantic import BaseModel

# The worker that scores models would import litellm and every scorer; the server only hands it on.
_worker = ModuleType("weave.trace_server.workers.evaluate_model_worker.evaluate_model_worker")
_worker.__dict__.update(EvaluateModelArgs=object, EvaluateModelDispatcher=object)
sys.modules[_worker.__name__] = _worker

from weave.trace_server import trace_server_interface as tsi  # noqa: E402
from weave.trace_server.external_to_internal_trace_server_adapter import ExternalTraceServer, IdConverter  # noqa: E402
from weave.trace_server.sqlite_trace_server import SqliteTraceServer  # noqa: E402

USER = "tester"
ROUTES = {
    "/call/read": "call_read",
    "/calls/stream_query": "calls_query_stream",
    "/calls/query_stats": "calls_query_stats",
    "/feedback/create": "feedback_create",
    "/feedback/batch/create": "feedback_create_batch",
    "/feedback/query": "feedback_query",
    "/threads/stream_query": "threads_query_stream",
}
Handler = Callable[[Request], Awaitable[Response]]


class Ids(IdConverter):
    """Maps `entity/project` to the id that weave stores: the hosted service asks W&B's database, we encode."""

    def ext_to_int_project_id(self, project_id: str) -> str:
        return base64.b64encode(project_id.encode()).decode()

    def int_to_ext_project_id(self, project_id: str) -> str | None:
        return base64.b64decode(project_id).decode()

    def ext_to_int_run_id(self, run_id: str) -> str:
        project, _, run = run_id.rpartition(":")
        return f"{self.ext_to_int_project_id(project)}:{run}"

    def int_to_ext_run_id(self, run_id: str) -> str:
        project, _, run = run_id.rpartition(":")
        return f"{self.int_to_ext_project_id(project)}:{run}"

    def ext_to_int_user_id(self, user_id: str) -> str:
        return user_id

    def int_to_ext_user_id(self, user_id: str) -> str:
        return user_id


def create_app(database: str, api_key: str) -> FastAPI:
    """The app; every handler runs in the event loop's thread, since weave keeps one sqlite connection a thread."""
    sqlite = SqliteTraceServer(database)
    sqlite.setup_tables()
    server = ExternalTraceServer(sqlite, Ids())
    basic = "Basic " + base64.b64encode(f"api:{api_key}".encode()).decode()

    def authorised(request: Request) -> None:
        sent = request.headers
        if sent.get("wandb-api-key") != api_key and sent.get("authorization") != basic:
            raise HTTPException(401, "expected the API key as wandb-api-key or as basic auth of user api")

    app = FastAPI()
    keyed = [Depends(authorised)]
    app.get("/server_info")(server_info)
    app.post("/graphql", dependencies=keyed)(graphql)
    app.post("/otel/v1/traces", dependencies=keyed)(otlp_handler(server))
    for path, method in ROUTES.items():
        app.post(path, dependencies=keyed)(json_handler(getattr(server, method)))
    return app


async def server_info() -> dict[str, str]:
    return {"min_required_weave_python_version": "0.0.1", "trace_server_version": "0.0.1"}


async def graphql(request: Request) -> object:
    """What `weave.init` asks the W&B application: who is it, and is the project there. Every project is."""
    asked = (await request.json()).get("variables") or {}
    viewer = {"id": "1", "username": USER, "email": "", "defaultEntity": {"name": USER}, "teams": {"edges": []}}
    return {"data": {"viewer": viewer, "project": {"id": "1", "name": asked.get("name")}}}


def otlp_handler(server: ExternalTraceServer) -> Handler:
    """OTLP over HTTP in protobuf: spans become calls; rejected ones are told in `partial_success`, as OTLP asks."""

    async def ingest(request: Request) -> Response:
        project_id = request.headers.get("project_id", "")
        if project_id.count("/") != 1:
            raise HTTPException(400, f"expected the header project_id as entity/project, got {project_id!r}")
        entity, project = project_id.split("/")
        spans = [
            tsi.ProcessedResourceSpans(entity=entity, project=project, run_id=None, resource_spans=spans)
            for spans in parse_otlp(await request.body(), request.headers.get("content-encoding")).resource_spans
        ]
        export = tsi.OTelExportReq(project_id=project_id, processed_spans=spans, wb_user_id=USER)
        rejected = server.otel_export(export).partial_success
        answer = ExportTraceServiceResponse()
        if rejected is not None:
            partial = ExportTracePartialSuccess(
                rejected_spans=rejected.rejected_spans, error_message=rejected.error_message
            )
            answer.partial_success.CopyFrom(partial)
        return Response(answer.SerializeToString(), media_type="application/x-protobuf")

    return ingest


def parse_otlp(body: bytes, encoding: str | None) -> ExportTraceServiceRequest:
    unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(encoding or "", bytes)
    try:
        return ExportTraceServiceRequest.FromString(unpack(body))
    except (DecodeError, OSError, zlib.error) as error:
        raise HTTPException(400, f"expected OTLP in protobuf, got {len(body)} bytes: {error}") from error


def json_handler(method: Callable[..., object]) -> Handler:
    """One of weave's own methods over HTTP; an iterator is answered line by line."""
    wanted = typing.get_type_hints(method)["req"]

    async def answer(request: Request) -> Response:
        result = method(parse_request(wanted, await request.json()))
        if isinstance(result, Iterator):
            lines = "".join(f"{item.model_dump_json()}\n" for item in result)
            return Response(lines, media_type="application/x-ndjson")
        assert isinstance(result, BaseModel)
        return Response(result.model_dump_json(by_alias=True), media_type="application/json")

    return answer


def parse_request(wanted: type[BaseModel], body: dict[str, object]) -> BaseModel:
    """The request without the fields that a newer client knows; writes get their author, as the service gives it."""
    if "batch" in body:
        items = body["batch"]
        assert isinstance(items, list)
        return wanted.model_validate({"batch": [item | {"wb_user_id": USER} for item in items]})
    known = {key: value for key, value in body.items() if key in wanted.model_fields}
    if "wb_user_id" in wanted.model_fields:
        known["wb_user_id"] = USER
    return wanted.model_validate(known)


def end_with_parent() -> None:
    """End when standard input does: a test run that was killed leaves no server behind."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    database, port, key = sys.argv[1:]
    uvicorn.run(create_app(database, key), host="127.0.0.1", port=int(port), log_level="warning")
