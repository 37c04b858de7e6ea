"""Trackway on several Ray nodes, from the Serve config of the manifests.

store   MLflow, Redis where it is wanted, and the test itself
head    Ray's head, which offers nothing
one     a worker pod of every group
two     a worker pod of every group but the trainer's, which also takes ranks of a learner
"""

import contextlib
import functools
import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests import waiting
from tests.cluster.network import Network
from tests.cluster.nodes import DASHBOARD_PORT, REDIS, Node
from tests.cluster.processes import started
from tests.e2e.access_tokens import OPERATOR, tokens_file
from trackway.clients.http_client import TOKEN
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi, replicas_at
from trackway.trainer.data import make_tiny
from trackway.wire.errors import TrackwayError
from trackway.wire.service import ReplicaInfo

ROOT = Path(__file__).parents[2]
HOSTS = ("store", "head", "one", "two")
SERVICES = ("rollout", "tools", "reward", "agent", "trainer")
REPLICAS = {"rollout": 2, "tools": 2, "reward": 2, "agent": 2, "trainer": 1}
ALL = {f"trackway_{pod}": 1 for pod in ("tools", "agent", "rollout")}
OFFERS = {"one": {**ALL, "trackway_trainer": 1}, "two": {**ALL, "trackway_learner": 1}}
MLFLOW_PORT, REDIS_PORT = 5000, 6379
PATIENCE_S = 240.0
"""Longest wait for what takes a minute where nothing else runs."""
until = functools.partial(waiting.until, within_s=PATIENCE_S, ignored=httpx.HTTPError)
"""Waits while the head's dashboard may not answer: a node goes or comes."""
PACED = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "services", "clients", "deploy")),
    "TRACKWAY_TOOLS": "[]",
    "TRACKWAY_EXTRA_TOOLS": '["tests.cluster.slow_calculator:SlowCalculator"]',
}
"""A run must still be there when a machine has started anew."""
MANIFESTS = ROOT / "k8s" / "base"
SERVE_YAML, SETTINGS_ENV = MANIFESTS / "serve.yaml", MANIFESTS / "settings.env"
MLFLOW, VOLUME = "http://trackway-mlflow:5000", "/var/lib/trackway"
"""What settings.env calls them."""


@dataclass
class Cluster:
    """What runs, and where."""

    network: Network
    nodes: dict[str, Node]
    deployment: Deployment

    @property
    def api(self) -> ServeApi:
        """Serve's REST API on the head."""
        return ServeApi(self.deployment.dashboard_url, self.deployment.token)

    def mend(self) -> None:
        """Bring back every node and every replica that a test has lost."""
        if not self.nodes["head"].alive:
            self.nodes["head"].start()
        until(self.api.answers)
        for host, node in self.nodes.items():
            self.network.heal(host)
            if not node.alive or host not in self.known_alive():
                node.kill()
                node.start()
        until(self.complete)

    def complete(self) -> bool:
        """Whether every replica that the config asks for is there and ready."""
        states = self.api.applications()
        for service, count in REPLICAS.items():
            state = states.get(service)
            assert state is None or state.status != "DEPLOY_FAILED", f"{service}: {state.message}"
            if state is None or state.replicas != {"RUNNING": count}:
                return False
        found = {service: self.replicas(service) for service in SERVICES}
        return all(
            len(found[service]) == REPLICAS[service] and all(r.ready.ready for r in found[service])
            for service in SERVICES
        )

    def replicas(self, service: str) -> list[ReplicaInfo]:
        """Every replica of a service, asked through the entry's proxy; none while one of them does not answer."""
        try:
            return replicas_at(f"{self.deployment.base_url}/{service}")
        except TrackwayError:
            return []

    def placed(self) -> dict[str, list[str]]:
        """The hosts of each service's running replicas, as Serve says."""
        host = {node.address: name for name, node in self.nodes.items()}
        body = self._dashboard("/api/serve/applications/")
        return {
            service: sorted(
                host[replica["node_ip"]]
                for deployment in body["applications"][service]["deployments"].values()
                for replica in deployment["replicas"]
                if replica["state"] == "RUNNING"
            )
            for service in SERVICES
        }

    def known_alive(self) -> set[str]:
        """The hosts whose nodes Ray takes for alive."""
        host = {node.address: name for name, node in self.nodes.items()}
        summary = self._dashboard("/nodes?view=summary")["data"]["summary"]
        return {host[node["ip"]] for node in summary if node["raylet"].get("state") == "ALIVE"}

    def _dashboard(self, path: str) -> dict:
        headers = {"Authorization": f"Bearer {self.deployment.token}"}
        answer = httpx.get(self.deployment.dashboard_url + path, headers=headers, timeout=30.0, trust_env=False)
        return answer.raise_for_status().json()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Say how long the block took."""
        began = time.monotonic()
        yield
        print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


@contextmanager
def running(folder: Path, redis: bool) -> Iterator[Cluster]:
    """A cluster whose services are called at the host `one`; with `redis` its head may be lost."""
    network = Network(*HOSTS)
    with ExitStack() as stack:
        stack.enter_context(network.connected())
        stack.enter_context(network.inside("store"))
        environment = settings(network, folder)
        if redis:
            environment |= stack.enter_context(redis_server(folder, network.address("store")))
        stack.enter_context(mlflow_server(folder, network.address("store")))
        nodes = {
            host: Node(network, host, folder / "nodes", environment, "head", OFFERS.get(host, {})) for host in HOSTS[1:]
        }
        cluster = Cluster(network, nodes, deployment(network, environment))
        for node in nodes.values():  # one after another: several at once starve one another
            stack.callback(node.kill)
            with cluster.timed(f"start of {node.host}"):
                node.start()
        make_tiny(cluster.deployment.outputs / "data", train_size=64, test_size=16, seed=0)
        with cluster.timed("deploy"):
            until(cluster.api.answers)
            cluster.api.deploy(cluster.deployment.serve_config)
            until(cluster.complete)
        yield cluster


def settings(network: Network, folder: Path) -> dict[str, str]:
    """The environment of the manifests' Ray pods, with this network's addresses and this machine's folders."""
    mlflow = f"http://{network.address('store')}:{MLFLOW_PORT}"
    lines = [line for line in SETTINGS_ENV.read_text().splitlines() if line and not line.startswith("#")]
    given = dict(line.split("=", 1) for line in lines)
    volume = str(folder / "volume")
    here = {name: text.replace(MLFLOW, mlflow).replace(VOLUME, volume) for name, text in given.items()}
    return {
        **here,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TRACKWAY_MODEL_PATH": str(TINY_MODEL),
        "TRACKWAY_TRACING__OTLP_ENDPOINT": f"{mlflow}/v1/traces",  # without a collector between
        "TRACKWAY_TRACING__SPOOL_DIR": str(folder / "spool"),
        "TRACKWAY_AUTH__TOKENS_FILE": str(tokens_file(folder)),
        TOKEN: OPERATOR,
        **PACED,
    }


def deployment(network: Network, environment: Mapping[str, str]) -> Deployment:
    """The record that the commands go by."""
    config = serve_config.load(SERVE_YAML)
    for service, count in REPLICAS.items():
        config = serve_config.with_replicas(config, service, Replicas(count, count))
    return Deployment(
        base_url=f"http://{network.address('one')}:8000",
        dashboard_url=f"http://{network.address('head')}:{DASHBOARD_PORT}",
        token=environment["RAY_AUTH_TOKEN"],
        mlflow_uri=environment["MLFLOW_TRACKING_URI"],
        outputs=Path(environment["TRACKWAY_OUTPUTS_DIR"]),
        processes=[],
        serve_config=config,
    )


@contextmanager
def mlflow_server(folder: Path, address: str) -> Iterator[None]:
    """MLflow on the host where this is called."""
    database_file = folder / "mlflow.db"
    with contextlib.closing(sqlite3.connect(database_file)) as database:
        database.execute("PRAGMA journal_mode=WAL")
    where = ["--host", address, "--port", str(MLFLOW_PORT), "--allowed-hosts", f"{address}:{MLFLOW_PORT}"]
    stores = ["--backend-store-uri", f"sqlite:///{database_file}", "--artifacts-destination", f"{folder / 'artifacts'}"]
    server = started(
        [sys.executable, "-m", "mlflow", "server", "--workers", "1", *where, *stores],
        folder / "mlflow.log",
        {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )
    try:
        until(lambda: answers(f"http://{address}:{MLFLOW_PORT}/health"))
        yield
    finally:
        server.kill()
        server.wait(30)


@contextmanager
def redis_server(folder: Path, address: str) -> Iterator[dict[str, str]]:
    """Redis on the host where this is called, and what Ray must know to keep the cluster's state in it."""
    password = secrets.token_hex(16)
    options = {"--bind": address, "--port": REDIS_PORT, "--requirepass": password, "--save": "", "--dir": folder}
    words = [str(word) for option in options.items() for word in option]
    server = started(["redis-server", *words], folder / "redis.log", {})
    try:
        yield {"RAY_REDIS_ADDRESS": f"{address}:{REDIS_PORT}", REDIS: password}
    finally:
        server.kill()
        server.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
