"""A local Ray head, started with this process's interpreter.

`ray` from PATH is not used, because workers would run on its Python. Token authentication is on, because any client of
the dashboard can run code.
"""

import secrets
import sys
from pathlib import Path

from trackway.deploy import http_proxy
from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.deploy.local.preflight import free_port


def new_token() -> str:
    """A random bearer token for one cluster."""
    return secrets.token_hex(32)


def start(port: int, dashboard_port: int, token: str, log: Path) -> ProcessRecord:
    """Start `ray start --head --block`, one process whose descendants form the whole cluster."""
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
        **http_proxy.ENVIRONMENT,
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
