"""Services, replicas and weight versions of a running deployment; and scaling one service alone."""

import time

from pydantic import BaseModel

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.deploy import serve_config
from trackway.deploy.errors import UserError
from trackway.deploy.ray_cluster import ServeApi
from trackway.deploy.serve_config import Replicas
from trackway.deploy.settings import Deployment
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import ReplicaInfo, ReplicaList

_ASK = CallPolicy(read_s=30.0, total_s=30.0, attempts=1)


class ServiceStatus(BaseModel):
    """One service as it runs."""

    service: str
    status: str
    url: str
    replicas: list[ReplicaInfo]
    message: str = ""


def service_statuses(deployment: Deployment) -> list[ServiceStatus]:
    """Every service's state, and each of its replicas as it describes itself."""
    states = ServeApi(deployment.dashboard_url, deployment.token).applications()
    found = []
    for service in deployment.services:
        state = states.get(service)
        url = f"{deployment.base_url}/{service}"
        status, message = (state.status, state.message) if state else ("NOT_DEPLOYED", "")
        replicas = _replicas(url) if status == "RUNNING" else []
        found.append(ServiceStatus(service=service, status=status, url=url, replicas=replicas, message=message))
    return found


def scale(
    deployment: Deployment, service: str, replicas: int | Replicas, timeout_s: float = 180.0
) -> list[ReplicaInfo]:
    """Change one service's number of replicas on the running system and wait until they are ready.

    Rollout replicas are ready when they hold the newest weights. Nothing else restarts, and no request is cut. With
    bounds, Ray Serve goes on choosing a number between them.
    """
    wanted = Replicas(replicas, replicas) if isinstance(replicas, int) else replicas
    config = serve_config.with_replicas(deployment.serve_config, service, wanted)
    api = ServeApi(deployment.dashboard_url, deployment.token)
    api.deploy(config)
    deployment.serve_config = config
    deployment.save()
    deadline = time.monotonic() + timeout_s
    while True:
        state = api.applications().get(service)
        if state and state.replicas.keys() == {"RUNNING"} and wanted.least <= state.replicas["RUNNING"] <= wanted.most:
            described = _replicas(f"{deployment.base_url}/{service}")
            if len(described) == state.replicas["RUNNING"] and all(_up_to_date(replica) for replica in described):
                return described
        if time.monotonic() > deadline:
            now = state.replicas if state else {}
            raise UserError(
                f"{service} has {now} instead of {wanted} replicas after {timeout_s:.0f} s; `trackway status`"
            )
        time.sleep(0.3)


def _up_to_date(replica: ReplicaInfo) -> bool:
    weights = replica.weights
    return replica.ready.ready and (weights is None or weights.version >= weights.latest)


def replicas_at(url: str) -> list[ReplicaInfo]:
    """Every replica of the service with this URL; TrackwayError when it does not answer."""
    return run(ServiceClient(url, policy=_ASK).call("GET", "/replicas", reply=ReplicaList)).replicas


def _replicas(url: str) -> list[ReplicaInfo]:
    try:
        return replicas_at(url)
    except TrackwayError as error:
        if error.code in (ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN):
            raise
        return []
