"""The five services as Ray Serve applications: `import_path: trackway.deploy.graph:tools`, `args`: its settings.

A service is a plain FastAPI factory; the one class below hosts any of them on a replica and lets all replicas be asked
at once. Heavy imports (torch, transformers) happen on the replica, never where the graph is built.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Ray sets it only from num_cpus; oversubscription costs up to 50x

import importlib
import uuid
from collections.abc import Callable, Sized
from typing import TypeVar

import httpx
import ray
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from ray import serve
from ray.serve import Application

from trackway.agent.settings import AgentSettings
from trackway.deploy.autoscaling import DIRECT_REQUESTS
from trackway.deploy.direct import DirectPort
from trackway.reward.settings import RewardSettings
from trackway.rollout.settings import RolloutSettings
from trackway.serving import AuthSettings, ServiceSettings, from_inside
from trackway.serving.settings import ServiceName
from trackway.tools.settings import ToolsSettings
from trackway.trainer.settings import TrainerSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health, Ready, ReplicaInfo, ReplicaList
from trackway.wire.rollout import WeightsReply

M = TypeVar("M", bound=BaseModel)

ASK_REPLICAS_S = 10.0
"""Longest wait for every replica's answer."""


def rollout(args: RolloutSettings) -> Application:
    """The rollout service."""
    return _application("rollout", args)


def tools(args: ToolsSettings) -> Application:
    """The tool server."""
    return _application("tools", args)


def reward(args: RewardSettings) -> Application:
    """The reward service."""
    return _application("reward", args)


def agent(args: AgentSettings) -> Application:
    """The agent service."""
    return _application("agent", args)


def trainer(args: TrainerSettings) -> Application:
    """The trainer service."""
    return _application("trainer", args)


class Replica:
    """Hosts one service's FastAPI app; beside its routes, `/replicas` asks every replica of the deployment."""

    def __init__(self, service: ServiceName, settings: ServiceSettings) -> None:
        module = importlib.import_module(f"trackway.{service}.app")
        create_app: Callable[[ServiceSettings], FastAPI] = module.create_app
        self._service = service
        self._app = create_app(settings.model_copy(update={"replica": uuid.uuid4().hex[:12], "auth": _auth(settings)}))
        self._app.include_router(_replicas_route(service))
        self._direct = _direct_port(settings, self._app)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def describe(self) -> ReplicaInfo:
        """What this replica is, asked through its own routes."""
        ready = await self._ask("/ready", Ready)
        weights = await self._ask("/weights", WeightsReply) if self._service == "rollout" and ready.ready else None
        url = self._direct.url if self._direct else ""
        return ReplicaInfo(health=await self._ask("/health", Health), ready=ready, weights=weights, url=url or None)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For policies that count what Serve does not see."""
        return {DIRECT_REQUESTS: self._direct.in_flight if self._direct else 0}

    async def check_health(self) -> None:
        """Raises when only a new replica helps, as when the engine is stuck; a replica that loads or pauses is healthy.

        Runs on the loop that answers requests: a blocked loop fails the check, Serve's default one would pass.
        """
        ready = await self._ask("/ready", Ready)
        if ready.broken:
            raise RuntimeError(ready.reason)

    async def _ask(self, path: str, reply: type[M]) -> M:
        transport = httpx.ASGITransport(app=from_inside(self._app))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=ASK_REPLICAS_S) as client:
            return reply.model_validate_json((await client.get(path)).content)


def _application(service: ServiceName, settings: ServiceSettings) -> Application:
    return serve.deployment(name=service)(serve.ingress()(Replica)).bind(service, settings)


def _direct_port(settings: ServiceSettings, app: FastAPI) -> DirectPort | None:
    """A port for callers who go past the proxy, of a service whose calls are shorter than the way through it."""
    if not isinstance(settings, ToolsSettings) or settings.direct_host == "":
        return None
    host = settings.direct_host
    if host is None:
        local = httpx.URL(settings.base_url).host in ("127.0.0.1", "localhost", "::1")
        host = "127.0.0.1" if local else ray.util.get_node_ip_address()
    instances: Sized = app.state.instances
    return DirectPort(app, host, instances.__len__, settings.drain_s)


def _auth(settings: ServiceSettings) -> AuthSettings:
    """HAProxy calls the replicas from this machine and does not say for whom."""
    hidden = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    return settings.auth.model_copy(update={"trust_loopback": settings.auth.trust_loopback and not hidden})


def _replicas_route(service: ServiceName) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/replicas", response_model=ReplicaList)
    async def replicas() -> ReplicaList:
        """Every running replica of this service."""
        handle = serve.get_deployment_handle(service, app_name=serve.get_replica_context().app_name)
        try:
            found = await handle.broadcast("describe").results_async(timeout_s=ASK_REPLICAS_S)
        except TimeoutError as error:
            message = f"not every {service} replica answered within {ASK_REPLICAS_S:.0f} s; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        return ReplicaList(replicas=sorted(found, key=lambda replica: replica.health.replica))

    return router
