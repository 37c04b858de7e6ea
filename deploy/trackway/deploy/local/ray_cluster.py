"""A local Ray head, started with this process's interpreter.

`ray` from PATH is not used, because workers would run on its Python. Token authentication is on, because any client of
the dashboard can run code.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from trackway.deploy import http_proxy
from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.system import free_port


def new_token() -> str:
    """A random bearer token for one cluster."""
    return secrets.token_hex(32)


def start(port: int, dashboard_port: int, token: str, log: Path, variables: Mapping[str, str]) -> ProcessRecord:
    """Start `ray start --head --block`, one process whose descendants form the whole cluster.

    `variables` are added to its environment. Of Ray's dashboard only Serve's REST API runs.
    """
    options = {
        "--node-ip-address": "127.0.0.1",
        "--port": port,
        "--include-dashboard": "true",
        "--dashboard-host": "127.0.0.1",
        "--dashboard-port": dashboard_port,
        "--dashboard-agent-listen-port": free_port(),
        "--include-log-monitor": "false",
        "--min-worker-port": 0,
        "--max-worker-port": 0,
        "--object-store-memory": 100_000_000,
        "--num-cpus": 8,
    }
    command = [sys.executable, "-m", "trackway.deploy.local.ray_head", "start", "--head", "--block"]
    command += ["--disable-usage-stats", "--no-monitor", *(f"{option}={value}" for option, value in options.items())]
    lean = {name: os.environ.get(name, value) for name, value in _LEAN.items()}
    return processes.start("ray", command, {**os.environ, **lean, **_environment(token), **variables}, log)


_LEAN = {
    "RAY_enable_metrics_collection": "false",  # Ray's own metrics; the services export theirs
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",  # instead of 100
    "RAY_task_events_report_interval_ms": "0",  # the dashboard's history of tasks
    "RAY_DASHBOARD_AGGREGATOR_AGENT_CHECK_MAIN_THREAD_LIVENESS_INTERVAL_SECONDS": "10",  # instead of 0.1
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # statistics of the node, instead of every 5 s
    "METRICS_RECORD_INTERVAL_S": "60",  # statistics of the REST API's process, instead of every 5 s
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # instead of 0.1: how soon a lost replica is replaced
    "RAY_num_workers_soft_limit": "1",  # idle workers that stay, instead of one for each of --num-cpus
}
"""Ray's work on an idle machine, less often or not at all. A variable that is in the environment stays."""


def _environment(token: str) -> dict[str, str]:
    return {
        # Else Ray replaces the loopback address of the node by a public one, on which all its servers listen.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_niceness": "0",  # Ray's 15 would let every other program go first, the local MLflow too
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        **http_proxy.ENVIRONMENT,
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
