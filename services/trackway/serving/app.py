"""The FastAPI factory of all services: the shared middleware around a service's routes, and its health."""

import asyncio
import os
import platform
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from trackway.clients import close_shared_http
from trackway.serving.auth import Authentication, Guests, TokenTable, show_tokens_in_docs
from trackway.serving.limits import JsonSize, RequestBounds, bound_server
from trackway.serving.metrics import Gauge, RequestMetrics, ServiceMetrics
from trackway.serving.middleware import BatchLoad, CatchAllErrors, DeadlineLimit, Idempotency, ReplicaName, TraceContext
from trackway.serving.routes import documented_error, install_error_answers
from trackway.serving.settings import ServiceSettings
from trackway.serving.user_code import OwnCodeSettings, contain_tasks
from trackway.system import escape_log_records
from trackway.tracing import SpanStats, Tracing
from trackway.wire.service import Health, Installation, Ready, SpanCounts

COMPARED_PACKAGES = (
    *("trackway", "ray", "pydantic", "fastapi", "httpx", "torch", "transformers", "tokenizers", "safetensors"),
    *("opentelemetry-sdk", "numpy"),
)
"""Packages whose mismatch breaks a deployment, or silently corrupts a run."""

REMEDY = (
    "start both from one environment (no other PYTHONPATH, no runtime_env.py_executable), or install the same versions"
)


@cache
def installation() -> Installation:
    """The installation of this process."""
    versions = {name: installed for name in COMPARED_PACKAGES if (installed := _version(name)) is not None}
    return Installation(python=platform.python_version(), executable=sys.executable, versions=versions)


def difference(expected: Installation, got: Installation) -> str:
    """The differences, with both sides. Empty if there are none. Aliases of an interpreter in a folder are equal."""
    differences = []
    if _interpreter(expected) != _interpreter(got):
        ours, theirs = f"{expected.executable} ({expected.python})", f"{got.executable} ({got.python})"
        differences.append(f"Python: expected {ours}, got {theirs}")
    for package in sorted(expected.versions.keys() | got.versions.keys()):
        ours, theirs = expected.versions.get(package, "none"), got.versions.get(package, "none")
        if ours != theirs:
            differences.append(f"{package}: expected {ours}, got {theirs}")
    return "; ".join(differences)


def _interpreter(installation: Installation) -> tuple[Path, str]:
    return Path(os.path.normpath(installation.executable)).parent, installation.python


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
ReadyCheck = Callable[[], Awaitable[Ready]]

_DOCS_FILES = "/docs-files"


def service_app(
    service: str,
    settings: ServiceSettings,
    *,
    routers: Sequence[APIRouter],
    lifespan: Lifespan | None = None,
    ready: ReadyCheck | None = None,
    tracing: Tracing | None = None,
    gauges: Sequence[Gauge] = (),
    collectors: Sequence[Collector] = (),
    guests: Guests = lambda method, path, headers: None,
) -> FastAPI:
    """The app of a service: its routers, `/health`, `/ready`, `/metrics`, `/docs`, and the shared middleware.

    `guests` admits callers by keys of the service's own, to the paths of those keys.

    Raises ValueError if the tokens file cannot be used.
    """
    escape_log_records()
    tracing = tracing or Tracing(service, settings.tracing)
    app = _ServiceApp(
        title=f"Trackway {service}",
        version=version("trackway"),
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(tracing, lifespan),
        # Our own span per hop carries the content, and FastAPI would look for providers on every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        responses={"4XX": documented_error("Client Error"), "5XX": documented_error("Server Error")},
    )
    tokens = TokenTable.of(settings.auth)
    app.state.settings = settings
    app.state.direct_url = ""  # a replica's own port, where it has one
    app.state.tracing = tracing
    app.state.tokens = tokens
    app.state.metrics = metrics = ServiceMetrics(service, tracing, gauges, collectors)
    app.state.batch_load = BatchLoad(metrics.in_flight)
    for router in [*routers, _common_routes(service, settings, tracing, metrics, ready)]:
        app.include_router(router)
    _serve_docs(app)
    install_error_answers(app)
    if tokens is not None:
        show_tokens_in_docs(app)
    routes = [route for router in routers for route in router.routes]
    # Starlette runs the last added middleware first.
    app.add_middleware(DeadlineLimit)
    app.add_middleware(CatchAllErrors, routes=routes)
    app.add_middleware(Idempotency)
    max_json = JsonSize(settings.max_json_items, settings.max_json_nodes)
    app.add_middleware(
        RequestBounds, max_bytes=settings.max_body_bytes, max_json=max_json, timeout_s=settings.body_timeout_s
    )
    app.add_middleware(TraceContext, tracing=tracing)
    app.add_middleware(CatchAllErrors, routes=routes)
    app.add_middleware(ReplicaName, replica=settings.replica)
    app.add_middleware(Authentication, tokens=tokens, trust_loopback=settings.auth.trust_loopback, guests=guests)
    app.add_middleware(RequestMetrics, metrics=metrics)
    return app


class _ServiceApp(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            bound_server(receive, self.state.settings)
        await super().__call__(scope, receive, send)


def _lifespan(tracing: Tracing, inner: Lifespan | None) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        contain_tasks(asyncio.get_running_loop())
        try:
            if inner is None:
                yield
            else:
                async with inner(app):
                    yield
        finally:
            await close_shared_http()
            tracing.shutdown()

    return lifespan


def _common_routes(
    service: str, settings: ServiceSettings, tracing: Tracing, metrics: ServiceMetrics, ready: ReadyCheck | None
) -> APIRouter:
    code = settings.version() if isinstance(settings, OwnCodeSettings) else None
    router = APIRouter(tags=["service"], generate_unique_id_function=lambda route: route.name)

    @router.get("/health", response_model=Health)
    async def health() -> Health:
        """The process is up; reports its interpreter, packages and own code."""
        return process_health(service, settings.replica, tracing).model_copy(update={"code": code})

    @router.get("/ready", response_model=Ready)
    async def readiness() -> JSONResponse:
        """200 when the service is ready, else 503 with the reason."""
        state = Ready(ready=True) if ready is None else await ready()
        return JSONResponse(state.model_dump(), status_code=200 if state.ready else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> PlainTextResponse:
        """Metrics of this process in Prometheus' text format."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _serve_docs(app: FastAPI) -> None:
    """Add `/docs` with its files from a package, and the redirect from `/`. Addresses are relative, for proxies."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def root(request: Request) -> RedirectResponse:
        return RedirectResponse(f"{request.scope.get('root_path', '').rstrip('/')}/docs")

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        relative = _DOCS_FILES.removeprefix("/")
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url=f"{relative}/swagger-ui-bundle.js",
            swagger_css_url=f"{relative}/swagger-ui.css",
            swagger_favicon_url=f"{relative}/favicon-32x32.png",
        )

    app.include_router(router)
    app.mount(_DOCS_FILES, StaticFiles(directory=str(files("fastapi_swagger.resources"))), name="docs-files")


def process_health(service: str, replica: str, tracing: Tracing | None = None) -> Health:
    """The installation of this process, its span counts and torch's threads."""
    torch = sys.modules.get("torch")  # imported by some services only
    return Health(
        service=service,
        replica=replica,
        pid=os.getpid(),
        **installation().model_dump(),
        trace_backends=[backend.value for backend in tracing.settings.usable] if tracing else [],
        spans=span_counts(tracing.stats()) if tracing else SpanCounts(),
        threads=torch.get_num_threads() if torch else None,
    )


def span_counts(stats: SpanStats) -> SpanCounts:
    """Span counts summed over all backends of a process."""
    backends = stats.backends.values()
    return SpanCounts(
        ended=stats.ended,
        exported=sum(backend.exported for backend in backends),
        dropped=stats.dropped + sum(backend.dropped for backend in backends),
        refused=sum(backend.refused for backend in backends),
        waiting=stats.queued + sum(backend.waiting for backend in backends),
        spool_bytes=sum(backend.spool_bytes for backend in backends),
    )
