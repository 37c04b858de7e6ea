"""A local Ray head, started from our own interpreter, and its REST API.

Never `ray` from PATH: workers would run on whatever Python that one belongs to. Token authentication is on, since
whoever reaches the dashboard can run code.
"""

import secrets
import sys
from pathlib import Path

import httpx
from pydantic import BaseModel

from trackway.deploy import processes
from trackway.deploy.preflight import free_port
from trackway.deploy.processes import ProcessRecord


def new_token() -> str:
    """A fresh bearer token for one cluster."""
    return secrets.token_hex(32)


def start(port: int, dashboard_port: int, token: str, log: Path) -> ProcessRecord:
    """Start `ray start --head --block`: one process whose descendants are the whole cluster."""
    options = {
        "--node-ip-address": "127.0.0.1",
        "--port": port,
        "--include-dashboard": "true",
        "--dashboard-host": "127.0.0.1",
        "--dashboard-port": dashboard_port,
        "--dashboard-agent-listen-port": free_port(),
        "--ray-client-server-port": free_port(),
        "--min-worker-port": 0,
        "--max-worker-port": 0,
        "--object-store-memory": 100_000_000,
        "--num-cpus": 8,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"{option}={value}" for option, value in options.items()]
    return processes.start("ray", command, _environment(token), log)


def _environment(token: str) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


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
        self._url = f"{dashboard_url}/api/serve/applications/"
        self._headers = {"Authorization": f"Bearer {token}"}

    def _request(self, method: str, body: dict[str, object] | None = None) -> httpx.Response:
        return httpx.request(method, self._url, json=body, headers=self._headers, timeout=30.0, trust_env=False)

    def answers(self) -> bool:
        """Whether the REST API is up."""
        try:
            return self._request("GET").status_code == 200
        except httpx.TransportError:
            return False

    def deploy(self, config: dict[str, object]) -> None:
        """Declare the wanted applications; they are built after this returns, so watch `applications`."""
        response = self._request("PUT", config)
        if response.is_error:
            raise RuntimeError(f"Ray Serve refused the config: HTTP {response.status_code}: {response.text[:2000]}")

    def applications(self) -> dict[str, ApplicationState]:
        """Every application's state and its replicas."""
        body = self._request("GET").raise_for_status().json()
        return {name: _state(name, details) for name, details in body.get("applications", {}).items()}


def _state(name: str, details: dict[str, object]) -> ApplicationState:
    counts: dict[str, int] = {}
    deployments = details.get("deployments") or {}
    assert isinstance(deployments, dict)
    for deployment in deployments.values():
        for replica in deployment.get("replicas", []):
            counts[replica["state"]] = counts.get(replica["state"], 0) + 1
    message = str(details.get("message") or "")
    return ApplicationState(name=name, status=str(details["status"]), message=message, replicas=counts)
