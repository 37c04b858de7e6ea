"""Status and scaling of a deployment's services, by the REST APIs of its Ray cluster's dashboard."""

import os
import time
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.clients.base import replicas_of
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.deployment.processes import tls
from trackway.deploy.deployment.record import Deployment
from trackway.system.process import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import ReplicaInfo
from trackway.wire.trainer import RunInfo

_KEPT = ("proxy_location", "http_options", "grpc_options", "target_capacity")
"""Settings that Serve reports and accepts. Other settings keep their value when a config omits them."""


def ray_token() -> str:
    """Ray's token from RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token. Empty without one.

    Raises:
        UserError: the file of RAY_AUTH_TOKEN_PATH cannot be read.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return ""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return (os.environ.get("RAY_AUTH_TOKEN") or file.read_text()).strip()
    except OSError as error:
        if not named:
            return ""
        raise UserError(f"RAY_AUTH_TOKEN_PATH: expected a file with Ray's token, got {named}: {error}") from error


class ApplicationState(BaseModel):
    """One Serve application as reported by the REST API."""

    name: str
    status: str
    message: str = ""
    replicas: dict[str, int] = {}
    """Number of replicas by state."""


class ServeApi:
    """Ray Serve's REST API on the dashboard."""

    def __init__(self, dashboard_url: str, token: str) -> None:
        """An empty `token` sends no authorization header."""
        self._url = f"{dashboard_url}/api/serve/applications/"
        self._nodes_url = f"{dashboard_url}/nodes"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def _request(self, method: str, body: dict[str, object] | None = None) -> httpx.Response:
        return httpx.request(
            method, self._url, json=body, headers=self._headers, timeout=30.0, trust_env=False, verify=tls()
        )

    def _ask(self, method: str, body: dict[str, object] | None = None) -> httpx.Response:
        try:
            response = self._request(method, body)
        except httpx.TransportError as error:
            message = f"no answer from Ray's REST API at {self._url} ({error}); check that Ray is running and reachable"
            raise UserError(message) from error
        if response.status_code in (401, 403):
            raise UserError(
                f"Ray's REST API at {self._url} refused the token (HTTP {response.status_code}); set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to the cluster's token"
            )
        if response.is_error:
            raise UserError(f"Ray's REST API at {self._url}: HTTP {response.status_code}: {response.text[:2000]}")
        return response

    def _details(self) -> dict[str, Any]:
        response = self._ask("GET")
        try:
            content = response.json()
            return {**content, "applications": dict(content["applications"])}
        except (ValueError, KeyError, TypeError) as error:
            message = f"expected Ray Serve's applications at {self._url}, got {response.text[:100]!r}"
            raise UserError(f"{message}; is this Ray's dashboard (port 8265)?") from error

    def node_resources(self) -> list[dict[str, float]]:
        """All Ray resources of each node that is alive, free or not. Raises UserError when Ray does not say them."""
        try:
            answer = httpx.get(
                self._nodes_url,
                params={"view": "summary"},
                headers=self._headers,
                timeout=30.0,
                trust_env=False,
                verify=tls(),
            )
            nodes = [node["raylet"] for node in answer.raise_for_status().json()["data"]["summary"]]
            return [node["resourcesTotal"] for node in nodes if node["state"] == "ALIVE"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"no list of Ray's nodes from {self._nodes_url} ({error!r})") from error

    def answers(self) -> bool:
        """Return whether the REST API is up."""
        try:
            return self._request("GET").status_code == 200
        except httpx.TransportError:
            return False

    def deploy(self, config: dict[str, object]) -> None:
        """Deploy the applications. Returns before they are running; poll `applications`."""
        self._ask("PUT", config)

    def config(self) -> dict[str, Any]:
        """The config that was deployed last, by any client. Deploying it again changes nothing.

        Applications started by a program (`serve.run`) are not included. Serve leaves those alone.
        """
        state = self._details()
        kept = {key: state[key] for key in _KEPT if state.get(key) is not None}
        configs = [details.get("deployed_app_config") for details in state["applications"].values()]
        return {**kept, "applications": [config for config in configs if config]}

    def applications(self) -> dict[str, ApplicationState]:
        """The state and replica counts of every application, by name."""
        return {name: _state(name, details) for name, details in self._details()["applications"].items()}


def _state(name: str, details: dict[str, object]) -> ApplicationState:
    counts: dict[str, int] = {}
    deployments = details.get("deployments") or {}
    assert isinstance(deployments, dict)
    for deployment in deployments.values():
        for replica in deployment.get("replicas", []):
            counts[replica["state"]] = counts.get(replica["state"], 0) + 1
    message = str(details.get("message") or "")
    return ApplicationState(name=name, status=str(details["status"]), message=message, replicas=counts)


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
