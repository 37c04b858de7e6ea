"""Status and scaling of a running deployment's services."""

import time

from pydantic import BaseModel

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.clients.base import replicas_of
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi, ray_token
from trackway.system.user_error import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import ReplicaInfo
from trackway.wire.trainer import RunInfo

_ASK = CallPolicy.question(30.0)


class ServiceStatus(BaseModel):
    """Status of one service."""

    service: str
    status: str
    url: str
    replicas: list[ReplicaInfo]
    message: str = ""
    runs: list[RunInfo] = []
    """For the trainer: its active runs."""
    notes: list[str] = []
    """For the trainer: metrics and feedback that backends have not received (`active_runs`)."""


def service_statuses(deployment: Deployment) -> list[ServiceStatus]:
    """The state of every service and of each of its replicas.

    Without Ray's REST API, RUNNING means that the replicas answered, and UNAVAILABLE that they did not.
    """
    if not deployment.dashboard_url:
        return [_asked(service, deployment.url(service)) for service in deployment.services]
    states = _serve(deployment).applications()
    statuses = []
    for service in deployment.services:
        state = states.get(service)
        url = deployment.url(service)
        status, message = (state.status, state.message) if state else ("NOT_DEPLOYED", "")
        replicas = _replicas(url) if status == "RUNNING" else []
        statuses.append(ServiceStatus(service=service, status=status, url=url, replicas=replicas, message=message))
    return statuses


def _asked(service: str, url: str) -> ServiceStatus:
    try:
        return ServiceStatus(service=service, status="RUNNING", url=url, replicas=replicas_at(url))
    except TrackwayError as error:
        if error.code in (ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN):
            raise
        return ServiceStatus(service=service, status="UNAVAILABLE", url=url, replicas=[], message=error.message)


def _serve(deployment: Deployment) -> ServeApi:
    token = ray_token() if deployment.attached else deployment.token
    return ServeApi(deployment.dashboard_url, token)


def scale(
    deployment: Deployment, service: str, replicas: int | Replicas, timeout_s: float = 180.0
) -> list[ReplicaInfo]:
    """Change the number of replicas of a running service, and wait until the replicas are ready.

    Rollout replicas are ready once they have the newest weights. No other service restarts, and no request is aborted.
    With bounds, Ray Serve autoscales between them. For attached services, the config is read from Ray Serve first,
    because other clients may have changed it.

    Raises:
        UserError: Ray's REST API is unknown, or the replicas were not ready within `timeout_s` seconds.
    """
    wanted = Replicas(replicas, replicas) if isinstance(replicas, int) else replicas
    if not deployment.dashboard_url:
        raise UserError(
            f"expected Ray's REST API to scale {service}, but {deployment.address} was attached without --ray-url; "
            "attach again with --ray-url, or change the Serve config of the services (on Kubernetes: "
            "k8s/base/serve.yaml)"
        )
    api = _serve(deployment)
    now = api.config() if deployment.attached else deployment.serve_config
    config = serve_config.with_replicas(now, service, wanted)
    api.deploy(config)
    if not deployment.attached:
        deployment.serve_config = config
        deployment.save()
    deadline = time.monotonic() + timeout_s
    while True:
        state = api.applications().get(service)
        if state and state.replicas.keys() == {"RUNNING"} and wanted.least <= state.replicas["RUNNING"] <= wanted.most:
            described = _replicas(deployment.url(service))
            if len(described) == state.replicas["RUNNING"] and all(_up_to_date(replica) for replica in described):
                return described
        if time.monotonic() > deadline:
            now = state.replicas if state else {}
            raise UserError(
                f"{service}: expected {wanted} replicas within {timeout_s:.0f} s, got {now}; check `trackway status`"
            )
        time.sleep(0.3)


def _up_to_date(replica: ReplicaInfo) -> bool:
    weights = replica.weights
    return replica.ready.ready and (weights is None or weights.version >= weights.latest)


def replicas_at(url: str) -> list[ReplicaInfo]:
    """Every replica of the service at this URL. Raises TrackwayError when it does not answer."""
    return run(replicas_of(ServiceClient(url, policy=_ASK))).replicas


def _replicas(url: str) -> list[ReplicaInfo]:
    try:
        return replicas_at(url)
    except TrackwayError as error:
        if error.code in (ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN):
            raise
        return []
