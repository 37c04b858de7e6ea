"""A Ray node on a host of its own: namespaces for network, processes, mounts, host name and shared memory.

The death of the process that `start` makes is the sudden death of the whole node, as when a machine loses its power.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cluster.network import Network
from tests.cluster.processes import RUNNING, STARTING, be_urgent, started

GCS_PORT, DASHBOARD_PORT = 6379, 8265
REDIS = "REDIS_PASSWORD"
_SPOOL = "TRACKWAY_TRACING__SPOOL_DIR"
_START_S = 60.0

HEALTH = {
    "RAY_health_check_initial_delay_ms": "10000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "8",
}
"""A dead node is known after some ten seconds, not after a minute."""


@dataclass
class Node:
    """One host of the cluster and what it offers."""

    network: Network
    host: str
    folder: Path
    environment: Mapping[str, str]
    head: str
    """The head's host."""
    resources: Mapping[str, float] = field(default_factory=dict)
    _process: "subprocess.Popen[bytes] | None" = None
    _starts: int = 0

    @property
    def address(self) -> str:
        """On the network."""
        return self.network.address(self.host)

    @property
    def log(self) -> Path:
        """What `ray start` says."""
        return self.folder / f"{self.host}-{self._starts}.log"

    def start(self, same_pod: bool = False) -> None:
        """Start it and wait until it has joined; a busy machine may need a second try.

        `same_pod`: with the spool of the node before it, as a container that its liveness probe starts anew.
        """
        spool = self.folder / f"{self.host}-{self._starts}" / "spool"
        for attempt in ("first", "second"):
            self._process = process = self._spawn(spool if same_pod else None)
            if self._joined():
                be_urgent(process, RUNNING)
                return
            self.kill()
            print(f"{self.host}: the {attempt} start failed:\n{self.log.read_text()[-1500:]}", flush=True)
        raise AssertionError(f"the Ray node on {self.host} did not start twice; the logs are in {self.folder}")

    def kill(self) -> None:
        """The power is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    @property
    def alive(self) -> bool:
        """Whether its processes run; Ray ends those of a node that it has declared dead."""
        return self._process is not None and self._process.poll() is None

    def run(self, *command: str) -> "subprocess.Popen[str]":
        """A program within the node, as `kubectl exec` starts one."""
        assert self._process is not None
        [first] = psutil.Process(self._process.pid).children()
        enter = ["nsenter", f"--target={first.pid}", "--net", "--mount", "--uts", "--ipc", "--pid"]
        process = subprocess.Popen(
            [*enter, *command],
            env={**os.environ, **self._environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        be_urgent(process, RUNNING)
        return process

    def _joined(self) -> bool:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self.alive:
            if "Ray runtime started" in self.log.read_text():
                return True
            time.sleep(0.2)
        return False

    def _spawn(self, spool: Path | None) -> "subprocess.Popen[bytes]":
        self._starts += 1
        own = self.folder / f"{self.host}-{self._starts}"  # a new machine has nothing of the old one's
        mounts = {Path("/tmp/ray"): own / "ray", Path(self.environment[_SPOOL]): own / "spool"}
        for place, folder in mounts.items():
            place.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True)
        if spool is not None:
            shutil.copytree(spool, own / "spool", dirs_exist_ok=True)
        binds = [f"mount --bind {folder} {place}" for place, folder in mounts.items()]
        shared_memory = "mount -t tmpfs -o size=1g tmpfs /dev/shm"
        script = " && ".join([f"hostname {self.host}", shared_memory, *binds, f"exec {' '.join(self._ray_start())}"])
        with self.network.inside(self.host):
            return started(["bash", "-c", script], self.log, self._environment(), STARTING, own=("--uts", "--ipc"))

    def _ray_start(self) -> list[str]:
        is_head = self.host == self.head
        options: dict[str, object] = {
            "--node-ip-address": self.address,
            "--num-cpus": 0 if is_head else 8,
            "--resources": f"'{json.dumps(dict(self.resources), separators=(',', ':'))}'",
            "--object-store-memory": 100_000_000,
            "--metrics-export-port": 8090,
            "--dashboard-agent-listen-port": 52365,
            "--dashboard-agent-grpc-port": 52366,
            "--runtime-env-agent-port": 52367,
        }
        if is_head:
            options |= {"--port": GCS_PORT, "--dashboard-host": "0.0.0.0", "--dashboard-port": DASHBOARD_PORT}
            options |= {"--redis-password": self.environment[REDIS]} if REDIS in self.environment else {}
        else:
            options["--address"] = f"{self.network.address(self.head)}:{GCS_PORT}"
        kind = ["--head"] if is_head else []
        words = [f"{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "ray.scripts.scripts", "start", *kind, *words, "--disable-usage-stats", "--block"]

    def _environment(self) -> dict[str, str]:
        return {
            **HEALTH,
            "RAY_agent_register_timeout_ms": "150000",
            "RAY_raylet_start_wait_time_s": "45",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "120",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "PYTHONWARNINGS": "ignore",
            **self.environment,
        }
