"""Ray Serve's REST API on the dashboard of this or another Ray cluster."""

import os
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from trackway.system.user_error import UserError

_KEPT = ("proxy_location", "http_options", "grpc_options", "target_capacity")
"""What Serve tells of itself and takes back; its other settings stay as they are when a config does not name them."""


def environments_token() -> str:
    """A cluster's token where Ray itself looks: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token; empty for none.

    Raises:
        UserError: RAY_AUTH_TOKEN_PATH is no file that can be read.
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
    """One Serve application as the REST API shows it."""

    name: str
    status: str
    message: str = ""
    replicas: dict[str, int] = {}
    """Number of replicas by state."""


class ServeApi:
    """Ray Serve's REST API on the dashboard."""

    def __init__(self, dashboard_url: str, token: str) -> None:
        """Without a token (an empty one) none is sent."""
        self._url = f"{dashboard_url}/api/serve/applications/"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def _request(self, method: str, body: dict[str, object] | None = None) -> httpx.Response:
        return httpx.request(method, self._url, json=body, headers=self._headers, timeout=30.0, trust_env=False)

    def _ask(self, method: str, body: dict[str, object] | None = None) -> httpx.Response:
        try:
            response = self._request(method, body)
        except httpx.TransportError as error:
            message = f"no answer from Ray's REST API at {self._url} ({error}); is it up, and reached from here?"
            raise UserError(message) from error
        if response.status_code in (401, 403):
            raise UserError(
                f"Ray's REST API at {self._url} wants its token (HTTP {response.status_code}); set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to that of the cluster"
            )
        if response.is_error:
            raise UserError(f"Ray's REST API at {self._url}: HTTP {response.status_code}: {response.text[:2000]}")
        return response

    def _told(self) -> dict[str, Any]:
        response = self._ask("GET")
        try:
            told = response.json()
            return {**told, "applications": dict(told["applications"])}
        except (ValueError, KeyError, TypeError) as error:
            message = f"expected Ray Serve's applications at {self._url}, got {response.text[:100]!r}"
            raise UserError(f"{message}; is this Ray's dashboard (port 8265)?") from error

    def answers(self) -> bool:
        """Whether the REST API is up."""
        try:
            return self._request("GET").status_code == 200
        except httpx.TransportError:
            return False

    def deploy(self, config: dict[str, object]) -> None:
        """Declare the wanted applications; they are built after this returns, so watch `applications`."""
        self._ask("PUT", config)

    def config(self) -> dict[str, Any]:
        """What `deploy` was given last, by whomever; deployed again, it changes nothing.

        Without applications that a program started (`serve.run`): Serve leaves those alone.
        """
        told = self._told()
        kept = {key: told[key] for key in _KEPT if told.get(key) is not None}
        configs = [details.get("deployed_app_config") for details in told["applications"].values()]
        return {**kept, "applications": [config for config in configs if config]}

    def applications(self) -> dict[str, ApplicationState]:
        """Every application's state and its replicas."""
        return {name: _state(name, details) for name, details in self._told()["applications"].items()}


def _state(name: str, details: dict[str, object]) -> ApplicationState:
    counts: dict[str, int] = {}
    deployments = details.get("deployments") or {}
    assert isinstance(deployments, dict)
    for deployment in deployments.values():
        for replica in deployment.get("replicas", []):
            counts[replica["state"]] = counts.get(replica["state"], 0) + 1
    message = str(details.get("message") or "")
    return ApplicationState(name=name, status=str(details["status"]), message=message, replicas=counts)
