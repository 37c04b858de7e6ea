"""The five services as Ray Serve applications: `import_path: trackway.deploy.graph:tools`, `args`: its settings.

A service is a plain FastAPI factory. The class below hosts any of them on a replica and adds routes that call every
replica. Heavy imports (torch, transformers) happen on the replica, never where the graph is built.
"""

import os

from ray.serve._private import constants, replica

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Ray sets it only from num_cpus; oversubscription costs up to 50x

import importlib
import uuid
from collections.abc import Callable, Mapping, Sized
from typing import Any, TypeVar, cast, get_args
from urllib.parse import urlencode

import httpx
import ray
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve
from ray.serve import Application

from trackway.deploy.autoscaling import DIRECT_REQUESTS
from trackway.deploy.serve.direct_port import DirectPort, ProbeSocket
from trackway.deploy.serve.fan_out import (
    Refusal,
    ReplicaMetrics,
    ReplicaPass,
    load_route,
    metrics_route,
    replicas_route,
    sleep_routes,
    to_each_replica_of,
    to_replicas_of,
)
from trackway.deploy.sigterm import end_at_sigterm
from trackway.serving import AuthSettings, ServiceSettings, from_inside
from trackway.serving.auth import TokenTable
from trackway.system import refuse_inspection
from trackway.wire.errors import ErrorReply
from trackway.wire.rollout import EngineLoad, SleepReply, WeightsReply
from trackway.wire.service import REPLICA, REQUEST_TIMEOUT, Health, Ready, ReplicaInfo, ServiceName


def keep_on_loopback() -> None:
    """Bind this process's server to 127.0.0.1, before Serve starts it.

    Serve binds it to all interfaces, and it unpickles the requests of any client. Trackway's handles use Ray's actor
    calls, as is Serve's default (`RAY_SERVE_USE_GRPC_BY_DEFAULT`).
    """
    if not constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        bind = replica.add_port_to_grpc_server  # pyright: ignore[reportPrivateImportUsage]
        replica.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")  # pyright: ignore[reportPrivateImportUsage]


M = TypeVar("M", bound=BaseModel)


def __getattr__(name: str) -> Callable[[Any], Application]:
    """The application builder of a service, `trackway.deploy.graph:<service>`.

    The settings of a service are imported with its builder, so a node needs the packages of its own services only.
    """
    if name not in get_args(ServiceName):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    service = cast("ServiceName", name)
    settings = getattr(importlib.import_module(f"trackway.{service}.settings"), f"{service.capitalize()}Settings")

    def build(args: ServiceSettings) -> Application:
        return serve.deployment(name=service)(serve.ingress()(Replica)).bind(service, args)

    build.__annotations__["args"] = settings  # Ray Serve reads here how to parse `args`
    return build


class Replica:
    """Hosts one service's FastAPI app, and adds `/replicas`, which calls every replica of the deployment."""

    def __init__(self, service: ServiceName, settings: ServiceSettings) -> None:
        end_at_sigterm()
        refuse_inspection()
        keep_on_loopback()
        if service == "trainer" and ray.is_initialized():
            _hand_over_launcher()
        module = importlib.import_module(f"trackway.{service}.app")
        create_app: Callable[[ServiceSettings], FastAPI] = module.create_app
        self._service = service
        name = uuid.uuid4().hex[:12]
        self._app = create_app(settings.model_copy(update={"replica": name, "auth": _auth(settings)}))
        broadcast = to_replicas_of(service)
        self._app.include_router(replicas_route(service, broadcast))
        self._app.include_router(metrics_route(to_each_replica_of(service)))
        if service == "rollout":
            self._app.include_router(sleep_routes(broadcast))
            self._app.include_router(load_route(broadcast))
        self._direct = _direct_port(settings, self._app)
        if settings.probe_dir:  # the outermost of the lifespan, so that probes fail before the replica drains
            metrics = self._app.state.metrics
            ProbeSocket(
                self._app, settings.probe_dir, f"{service}-{name}", self._ready, lambda: metrics.requests_in_flight
            )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def describe(self) -> ReplicaInfo:
        """The description of this replica, read from its own routes."""
        ready = await self._ready()
        weights = await self._ask("/weights", WeightsReply) if self._service == "rollout" and ready.ready else None
        url = self._direct.url if self._direct else ""
        return ReplicaInfo(health=await self._ask("/health", Health), ready=ready, weights=weights, url=url or None)

    async def load(self, caller: str) -> EngineLoad | None:
        """The load of this replica's engine, or None while it does not answer."""
        answer = await self._request("GET", f"/load?{urlencode({'caller': caller})}")
        return EngineLoad.model_validate_json(answer.content) if answer.is_success else None

    async def exposition(self) -> ReplicaMetrics:
        """This replica's metrics in Prometheus' text format."""
        answer = await self._request("GET", "/metrics")
        if not answer.is_success:  # not httpx's own error, which cannot travel between processes
            raise RuntimeError(f"/metrics answered {answer.status_code}: {answer.text}")
        return ReplicaMetrics(self._app.state.settings.replica, answer.text)

    async def admit(self, digest: bytes) -> ReplicaPass:
        """The pass that replaces the token with this sha256 digest at this replica's direct port."""
        tokens: TokenTable | None = self._app.state.tokens
        opens = tokens.pass_for(digest) if tokens and self._direct else None
        return ReplicaPass(self._app.state.settings.replica, opens)

    async def steer(self, method: str, path: str, timeout_s: float) -> SleepReply | Refusal:
        """Sleep or wake up through this replica's routes. Returns the refusal on failure."""
        answer = await self._request(method, path, {REQUEST_TIMEOUT: f"{max(0.0, timeout_s):.3f}"})
        if answer.is_success:
            return SleepReply.model_validate_json(answer.content)
        return Refusal(replica=answer.headers[REPLICA], error=ErrorReply.model_validate_json(answer.content).error)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for autoscaling policies: requests that Serve does not count."""
        return {DIRECT_REQUESTS: self._direct.load() if self._direct else 0.0}

    async def check_health(self) -> None:
        """Raise RuntimeError when the replica must be replaced, for example when the engine is stuck. A replica that
        is loading or paused is healthy.

        Runs on the event loop that answers requests, so a blocked loop fails the check. Serve's default would pass.
        """
        ready = await self._ready()
        if ready.broken:
            raise RuntimeError(ready.reason)

    async def _ready(self) -> Ready:
        return await self._ask("/ready", Ready)

    async def _ask(self, path: str, reply: type[M]) -> M:
        return reply.model_validate_json((await self._request("GET", path)).content)

    async def _request(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        transport = httpx.ASGITransport(app=from_inside(self._app))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.request(method, path, headers=headers)


def _hand_over_launcher() -> None:
    """Lets the runs, which are processes of their own, place ranks of their learner on nodes of this cluster."""
    from trackway.learner.ranks.launch import LAUNCHER  # a node without the trainer lacks its packages

    os.environ[LAUNCHER] = "trackway.deploy.serve.rank_nodes:RayNodes"
    os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)


def _direct_port(settings: ServiceSettings, app: FastAPI) -> DirectPort | None:
    """The port for direct calls, unless it is switched off."""
    if settings.direct_host == "":
        return None
    host = settings.direct_host
    if host is None:
        local = httpx.URL(settings.base_url).host in ("127.0.0.1", "localhost", "::1")
        host = "127.0.0.1" if local else "node"
    instances: Sized = getattr(app.state, "instances", ())  # only tools hold anything between two calls
    address = ray.util.get_node_ip_address() if host == "node" else host
    return DirectPort(
        app, address, instances.__len__, settings.drain_s, settings, app.state.batch_load, settings.direct_port
    )


def _auth(settings: ServiceSettings) -> AuthSettings:
    """The auth settings. Loopback is not trusted behind HAProxy, which calls from this machine for any client."""
    hidden = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    return settings.auth.model_copy(update={"trust_loopback": settings.auth.trust_loopback and not hidden})
