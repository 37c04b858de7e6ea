"""The quick start's pods, started for real by podman: our images under the manifests' own security, memory and probes.

KubeRay itself does not run here: what it makes of the RayService is filled in by `pods_kuberay`. Nor does PostgreSQL or
the collector: MLflow has a database in a file, and spans go straight to it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
import yaml

from tests.k8s.checks.model import Object, part
from tests.k8s.checks.render import Render, rendered
from tests.k8s.pods_kuberay import (
    HEAD_SERVICE,
    ROOT,
    Surroundings,
    plain_pod,
    probe,
    ray_pod,
    secrets_from,
    settings_of,
)
from tests.k8s.pods_podman import Podman
from tests.k8s.pods_volumes import Volumes
from trackway.deploy.deployment.serve_api import ServeApi

HEAD, WORKER, MLFLOW, JOB = (f"198.51.100.{number}" for number in (10, 11, 12, 13))
TOOLS = "trackway-tools:0.1.0"
HEAD_CONTAINER, WORKER_CONTAINER = "quickstart-head-ray-head", "quickstart-worker-ray-worker"

pytestmark = [
    pytest.mark.pods,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("podman"), reason="pods need podman, as root"),
]


@dataclass
class Quickstart:
    """The overlay's pods, all of them ready."""

    podman: Podman
    around: Surroundings
    overlay: Render

    @property
    def head(self) -> Object:
        """The head's group."""
        return part(self.overlay.of("RayService")[0], "spec.rayClusterConfig.headGroupSpec")

    @property
    def worker(self) -> Object:
        """The one worker group."""
        [group] = part(self.overlay.of("RayService")[0], "spec.rayClusterConfig.workerGroupSpecs")
        return group

    def call(self, method: str, path: str, key: str | None = None, body: object = None) -> httpx.Response:
        """A request from outside of the pods, with one of the tokens."""
        headers = {"Authorization": f"Bearer {self.around.secrets['trackway-tokens'][key]}"} if key else {}
        url = f"http://{WORKER}:8000{path}"
        return httpx.request(method, url, headers=headers, json=body, timeout=30.0, trust_env=False)


@pytest.fixture(scope="module")
def quickstart() -> Iterator[Quickstart]:
    with ExitStack() as stack:
        volumes = Volumes()
        stack.callback(volumes.remove)
        podman = Podman(f"trackway-{os.getpid()}")
        stack.callback(podman.remove)
        yield _started(podman, volumes)


def _started(podman: Podman, volumes: Volumes) -> Quickstart:
    made = subprocess.run(["bash", ROOT / "k8s/secrets.sh"], capture_output=True, text=True, check=True)
    secrets = secrets_from([document for document in yaml.safe_load_all(made.stdout) if document])
    overlay = rendered(ROOT / "k8s/overlays/cpu-quickstart", {name: set(keys) for name, keys in secrets.items()})
    assert isinstance(overlay, Render), overlay
    services = {HEAD_SERVICE: HEAD, "trackway-mlflow": MLFLOW, "trackway-serve-svc": WORKER}
    straight = settings_of(overlay.objects, TRACKWAY_TRACING__OTLP_ENDPOINT="http://trackway-mlflow:5000/v1/traces")
    started = Quickstart(podman, Surroundings(volumes, secrets, straight, services), overlay)
    _start_mlflow(started)
    _start_ray(started)
    return started


def _start_mlflow(quickstart: Quickstart) -> None:
    deployment = quickstart.overlay.find("Deployment", "trackway-mlflow")
    assert deployment
    pod = plain_pod("quickstart-mlflow", part(deployment, "spec.template"), quickstart.around)
    [server] = pod["spec"]["containers"]
    stores = [argument for argument in server["args"] if not argument.startswith("--backend-store-uri=")]
    server["args"] = [*stores, "--backend-store-uri=sqlite:////var/lib/mlflow/mlflow.db"]
    quickstart.podman.play(pod, MLFLOW)


def _start_ray(quickstart: Quickstart) -> None:
    """As KubeRay does: the head, then the worker, then the Serve config over Ray's REST API."""
    podman, around = quickstart.podman, quickstart.around
    [service] = quickstart.overlay.of("RayService")
    podman.play(ray_pod("quickstart-head", service, quickstart.head, around), HEAD)
    ray = ServeApi(f"http://{HEAD}:8265", around.secrets["trackway-ray"]["auth_token"])
    podman.wait("Ray's REST API", HEAD_CONTAINER, ray.answers, 600.0)
    podman.play(ray_pod("quickstart-worker", service, quickstart.worker, around), WORKER)
    ray.deploy(yaml.safe_load(part(service, "spec.serveConfigV2")))
    asks = probe(quickstart.worker)
    podman.wait(
        "the worker's readiness", WORKER_CONTAINER, lambda: podman.exec(WORKER_CONTAINER, asks).returncode == 0, 600.0
    )


def test_the_image_of_head_and_tools_is_small_and_has_no_torch(quickstart: Quickstart) -> None:
    assert quickstart.podman.inspect(TOOLS)["Size"] < 420_000_000
    said = quickstart.podman.run(TOOLS, ["python", "-c", "import trackway.deploy.graph, torch"])
    assert said.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch'"


@pytest.mark.parametrize(
    ("container", "memory_mi"), [(HEAD_CONTAINER, 2560), (WORKER_CONTAINER, 5120), ("quickstart-mlflow-mlflow", 1536)]
)
def test_pods_run_with_the_rights_and_bounds_of_the_manifest(
    quickstart: Quickstart, container: str, memory_mi: int
) -> None:
    said = quickstart.podman.inspect(container)
    host = said["HostConfig"]
    assert said["Config"]["User"] == "10001:10001"
    assert host["ReadonlyRootfs"] is True
    assert host["Memory"] == memory_mi * 1024**2
    assert not said["EffectiveCaps"] and not said["BoundingCaps"]
    assert "no-new-privileges" in host["SecurityOpt"]


def test_a_process_of_a_pod_sees_the_same(quickstart: Quickstart) -> None:
    read = "id -u; grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '[:blank:]'; touch /opt/trackway/x"
    said = quickstart.podman.exec(WORKER_CONTAINER, ["bash", "-c", read])
    assert said.stdout.split() == ["10001", "CapBnd:0000000000000000", "NoNewPrivs:1", "Seccomp:2"]
    assert said.stderr.strip() == "touch: cannot touch '/opt/trackway/x': Read-only file system"


@pytest.mark.parametrize("address", [HEAD, WORKER])
def test_the_probes_that_ask_a_node_by_http_pass(quickstart: Quickstart, address: str) -> None:
    [ray] = part(quickstart.worker if address == WORKER else quickstart.head, "template.spec.containers")
    gets = [ray[name]["httpGet"] for name in ("readinessProbe", "livenessProbe") if "httpGet" in ray[name]]
    assert gets
    for get in gets:
        url = f"http://{address}:{get['port']}{get['path']}"
        answer = httpx.get(url, timeout=30.0, trust_env=False)
        assert answer.status_code == 200, answer.text


def test_a_tool_is_called_with_a_token_and_not_without(quickstart: Quickstart) -> None:
    body = {"arguments": {"expression": "12*7"}}
    assert quickstart.call("POST", "/tools/tools/calculator/execute", None, body).status_code == 401
    answer = quickstart.call("POST", "/tools/tools/calculator/execute", "client-token", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == "84"


def test_the_demo_job_trains_on_the_pods(quickstart: Quickstart) -> None:
    job = quickstart.overlay.find("Job", "trackway-demo")
    assert job
    pod = plain_pod("quickstart-demo", part(job, "spec.template"), quickstart.around)
    [demo] = pod["spec"]["containers"]
    demo["args"] += ["--json", "trainer.total_training_steps=2"]
    podman = quickstart.podman
    podman.play(pod, JOB)
    assert podman.ended("quickstart-demo-demo", 900.0) == 0, podman.log("quickstart-demo-demo")
    summary = json.loads((quickstart.around.volumes.claim("trackway-data") / "demo/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["failed_trajectories"] == 0
    assert summary["complete_traces"] == summary["traced"] > 0


def test_a_pod_drains_and_stops(quickstart: Quickstart) -> None:
    """The last test: afterwards nothing answers."""
    [ray] = part(quickstart.worker, "template.spec.containers")
    pre_stop = part(ray, "lifecycle.preStop.exec.command")
    # There is no other node to move to, and a replica that ends waits for two seconds.
    drained = quickstart.podman.exec(WORKER_CONTAINER, [*pre_stop[:-1], "1"])
    assert drained.returncode == 0, drained.stderr
    assert drained.stdout.startswith("drain: not empty (SERVE_REPLICA::"), drained.stdout
    quickstart.podman.stop("quickstart-worker", 60)
    assert quickstart.podman.inspect(WORKER_CONTAINER)["State"]["OOMKilled"] is False
    with pytest.raises(httpx.TransportError):
        quickstart.call("GET", "/tools/tools")
